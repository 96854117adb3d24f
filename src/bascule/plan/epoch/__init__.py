"""Deals the samples of an epoch, whose lengths are all known, to ranks and microbatches."""
