"""Configurations of trainers: the data sets that they name, and what becomes of their samples.

A key is applied as its trainer applies it, or is listed as harmless, or ends the command by name.
Sources: `library/train_util.py` of sd-scripts, `dataset/bucket.py` and `image_video_dataset.py` of
musubi-tuner, `multiaspect/image.py` and `metadata/backends/base.py` of SimpleTuner.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.checks import choice, number, shown
from bascule.workload.tokens import nearest

Clip = Callable[[Floats], tuple[Floats, Floats]]
Taken = tuple[Floats, Floats, Floats, Floats]
Take = Callable[[Floats, Floats, Floats], Taken]
"""Makes width, height and frames of samples, and how many such samples a row gives, of a row's."""

_LISTS = ("metadata_file", "image_jsonl_file", "video_jsonl_file")
_FOLDERS = ("image_dir", "image_directory", "video_directory", "instance_data_dir")
_HARMLESS = frozenset(
    """alpha_mask batch_size cache_dir cache_dir_conditioning_image_embeds cache_dir_vae
    cache_directory cache_info caption_dropout_every_n_epochs caption_dropout_rate
    caption_filter_list caption_prefix caption_separator caption_shuffle caption_strategy
    caption_suffix caption_tag_dropout_rate class_tokens color_aug compress_cache
    conditioning_data_dir conditioning_image_embed_batch_size conditioning_image_embeds
    crop_aspect_buckets crop_style custom_attributes debug_dataset default
    disable_multiline_split disable_validation enable_wildcard face_crop_aug_range flip_aug
    hash_filenames id image_embeds instance_prompt is_regularisation_data is_regularization_data
    keep_tokens keep_tokens_separator max_upscale_threshold maximum_image_size
    metadata_update_interval network_multiplier only_instance_prompt prepend_instance_prompt
    preserve_data_backend_cache prior_loss_weight random_crop resize_interpolation
    secondary_separator shorten_filenames shuffle_caption skip_file_discovery
    target_downsample_size text_cache_disable text_cache_ondemand text_embeds
    timestep_sampling_offset token_warmup_min token_warmup_step train_batch_size
    vae_cache_clear_each_epoch vae_cache_disable vae_cache_ondemand validation_seed
    video.frame_interval video.is_i2v""".split()
)
_NEUTRAL: dict[str, object] = {  # keys that change nothing with this value, or if they are off
    **dict.fromkeys("is_reg multiple_target no_resize_control validation_split".split()),
    **dict.fromkeys("end_epoch end_step max_num_samples start_step".split()),
    **{"probability": 1, "start_epoch": 1, "type": "local", "metadata_backend": "discovery"},
    "video.bucket_strategy": "aspect_ratio",
}
_REFERENCES = ("control_directory", "conditioning", "conditioning_data")
_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}  # SimpleTuner's, by megapixels


@dataclass(frozen=True, slots=True)
class DataSet:
    """A folder or a table that a configuration names.

    Attributes:
        places: Its data: the first of these that exists.
        takes: What the trainer makes of each row; an entry for each time that it is trained.
