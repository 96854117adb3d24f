"""Inputs to plan for: data codes, manifests, masks, traces and requests. Nothing imports torch."""

from bascule.workload.codes import parse_data_codes as parse_data_codes
from bascule.workload.codes import sample_lengths as sample_lengths
from bascule.workload.manifest import Manifest as Manifest
from bascule.workload.manifest import read_manifest as read_manifest
from bascule.workload.masks import load_masks as load_masks
from bascule.workload.masks import save_masks as save_masks
from bascule.workload.tokens import TokenRule as TokenRule
