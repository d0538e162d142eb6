"""Generation with a cache beside Hugging Face's `generate`, from the same weights.

python -m benchmarks.generate [--workload nano] [--batch-size 1] [--rounds 7] [--json FILE]

Greedy, the same prompt; both must choose the same tokens before anything is timed. `bound` is the time
of reading every weight once, at the rate at which all cores read a large matrix here and now.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version

import torch

from benchmarks import output, peers, positive
from oelm import GPT, ModelConfig
from oelm.bench import Ratio
from oelm.model.config import PRESETS
from oelm.model.decoder import Decoder
from oelm.train.timing import reading_rate, timed

CPU = torch.device("cpu")
PROMPT, NEW = 8, 100


def compare(workload, batch_size, rounds):
    shape = ModelConfig.preset(workload)
    ours = GPT(shape).eval()
    theirs, _ = peers.hugging_face(ours)
    theirs.eval()
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.vocab_size, (batch_size, PROMPT), generator=draw)
    theirs.generation_config.eos_token_id = None  # ours goes on after it, so theirs must too
    rest = {"do_sample": False, "pad_token_id": 0, "use_cache": True}

    began = time.perf_counter()
    decoder = Decoder(ours)  # once per model, as another would load it
    layout_seconds = time.perf_counter() - began

    def own():
        return torch.stack(list(ours.generate(prompt, NEW, temperature=0, decoder=decoder)), dim=1)

    def hugging_face():
        out = theirs.generate(prompt, max_new_tokens=NEW, **rest)
        return out[:, PROMPT:]

    assert torch.equal(own(), hugging_face())
    seconds = {"oelm": [], "Hugging Face": []}
    rates = []
    for _ in range(rounds):
        before = reading_rate(CPU)
        seconds["oelm"].append(timed(own, CPU) / NEW)
        rates.append((before + reading_rate(CPU)) / 2)
        seconds["Hugging Face"].append(timed(hugging_face, CPU) / NEW)
    weights = sum(p.numel() for p in ours.parameters()) * 4
    ratio = Ratio.of(seconds["Hugging Face"], seconds["oelm"])
    bound = [weights / rate / own for rate, own in zip(rates, seconds["oelm"], strict=True)]
    return {
        "workload": workload,
        "batch_size": batch_size,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "versions": {p: version(p) for p in ("torch", "transformers")},
        "ms_per_token": {k: statistics.median(v) * 1e3 for k, v in seconds.items()},
        "hugging_face_time_of_ours": [ratio.median, ratio.low, ratio.high],
        "of_bandwidth_bound": statistics.median(bound),
        "layout_seconds": layout_seconds,
    }


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--workload", choices=PRESETS, default="nano")
    options.add_argument("--batch-size", type=positive, default=1)
    options.add_argument("--rounds", type=positive, default=7)
    options.add_argument("--json", type=output, help="also write the numbers here")
    given = options.parse_args()
    result = compare(given.workload, given.batch_size, given.rounds)
    ms, (median, low, high) = result["ms_per_token"], result["hugging_face_time_of_ours"]
    print(f"{given.workload}, batch {given.batch_size}: oelm {ms['oelm']:.2f} ms a token, Hugging Face "
          f"{ms['Hugging Face']:.2f} ms, {median:.2f}× ({low:.2f} to {high:.2f}); "
          f"{result['of_bandwidth_bound']:.2f} of the bandwidth bound")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
