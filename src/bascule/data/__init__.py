"""Streams of training samples: synthetic ones with the lengths of data codes, and photos."""

from bascule.data.photos import PHOTO_SUFFIXES as PHOTO_SUFFIXES
from bascule.data.photos import PhotoStream as PhotoStream
from bascule.data.streams import SampleBatch as SampleBatch
from bascule.data.streams import SampleStream as SampleStream
from bascule.data.streams import SyntheticStream as SyntheticStream
from bascule.data.streams import flow_noise as flow_noise
from bascule.data.streams import flow_timesteps as flow_timesteps
from bascule.data.streams import image_positions as image_positions
from bascule.data.streams import pack_batch as pack_batch
from bascule.data.streams import sample_normals as sample_normals
