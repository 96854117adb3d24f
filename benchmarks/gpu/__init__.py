"""The topics of `bench_gpu.py`: what one GPU does, beside what the same card was measured to do."""
