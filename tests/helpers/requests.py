"""Requests as published measurements have them: costs, mixes and arrivals."""

from collections.abc import Sequence

import numpy as np

from bascule.plan.requests import Request

# Qwen-Image on H20, milliseconds a step by tokens at degrees 1, 2, 4 (GF-DiT's README).
H20_MS = {1024: (155, 161, 172), 4096: (605, 350, 207), 9216: (1557, 880, 464)}
RANDOM4 = {  # tokens, steps, share (vLLM-Omni 3916)
    "512": (1024, 20, 0.15),
    "768": (2304, 20, 0.25),
    "1024": (4096, 25, 0.45),
    "1536": (9216, 35, 0.15),
}


def qwen_step(tokens: int, degrees: Sequence[int] = (1,)) -> dict[int, float]:
    """Seconds a step: a parabola through the three measured sizes, times measured gains."""
    one = (4.817e-6 * tokens**2 + 0.12182 * tokens + 25.2) / 1e3
    sizes = list(H20_MS)
    gains = [
        np.interp(tokens, sizes, [x[0] / x[place] for x in H20_MS.values()]) for place in range(3)
    ]
    by_degree: dict[int, float] = dict(
        zip((1, 2, 4), (one / float(gain) for gain in gains), strict=True)
    )
    return {degree: by_degree[degree] for degree in degrees}


def random4(
    rate: float, seed: int, *, degrees: Sequence[int] = (1,), num: int = 500
) -> list[Request]:
    """Four sizes in random order, one each 1 / rate seconds."""
    random, kinds = np.random.default_rng(seed), list(RANDOM4)
    chosen = random.choice(4, size=num, p=[share for _, _, share in RANDOM4.values()])
    steps = {kind: qwen_step(RANDOM4[kind][0], degrees) for kind in kinds}
    return [
        Request(
            step_s=steps[kinds[k]], steps=RANDOM4[kinds[k]][1], arrival_s=i / rate, kind=kinds[k]
        )
        for i, k in enumerate(chosen.tolist())
    ]


# GF-DiT's synthetic Wan: tokens, voxels, and the factor of its deadlines.
WAN = {
    "S": (20_280, 832 * 480 * 49, 2.0),
    "M": (32_760, 832 * 480 * 81, 2.5),
    "L": (75_600, 1280 * 720 * 81, 3.5),
}
GAINS = {1: 1.0, 2: 1.82, 4: 3.33, 8: 5.88}
PHASES = [  # end, requests a minute, shares of S, M, L: their trace "tridentserve"
    (600, 0.8, (0.5, 0.35, 0.15)),
    (1500, 1.4, (0.35, 0.40, 0.25)),
    (2400, 2.4, (0.5, 0.3, 0.2)),
    (3000, 1.2, (0.2, 0.35, 0.45)),
    (3600, 0.6, (0.55, 0.35, 0.10)),
]


def wan(kind: str, arrival_s: float) -> Request:
    """50 steps of a clip, due after some times of what one rank needs."""
    tokens, voxels, factor = WAN[kind]
    step = {d: tokens * 0.1323e-3 / gain + 0.02 * (d - 1) for d, gain in GAINS.items()}
    once = 9e-11 * voxels + 0.155
    deadline = arrival_s + factor * (50 * step[1] + once) + 5
    return Request(
        step_s=step, steps=50, once_s=once, arrival_s=arrival_s, deadline_s=deadline, kind=kind
    )


def gf_dit(load: float, num_ranks: int, seed: int) -> list[Request]:
    """Poisson arrivals in phases, scaled so that their work is a share of what the ranks can do."""
    mean = {kind: wan(kind, 0.0).work_s for kind in WAN}
    begins = [0, *(end for end, _, _ in PHASES)]
    work = sum(
        (end - begin) * rate / 60 * float(np.dot(shares, list(mean.values())))
        for begin, (end, rate, shares) in zip(begins, PHASES, strict=False)
    )
    scale, random = load * num_ranks * PHASES[-1][0] / work, np.random.default_rng(seed)
    requests: list[Request] = []
    for begin, (end, rate, shares) in zip(begins, PHASES, strict=False):
        now = begin + random.exponential(60 / rate / scale)
        while now < end:
            requests.append(wan("SML"[int(random.choice(3, p=shares))], float(now)))
            now += random.exponential(60 / rate / scale)
    return requests
