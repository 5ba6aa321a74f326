"""`transformers.generate` as a process for `prorl bench policy`.

`python -m prorl.bench.policy_rival DIR`.

One JSON line in, one out: `{"generate": [[ids]], "max_new_tokens"}` gives `{"seconds", "cpu_s"}`,
`{"score": [ids]}` gives `{"logprobs"}` of ids[1:]. The first line out is `{}`, or `{"problem"}`
where transformers is not installed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from prorl.types import Json


def main() -> None:
    """Answer until standard input ends."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as missing:
        print(json.dumps({"problem": f"not installed: {missing.name}"}), flush=True)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = (
            _score(model, question["score"])
            if "score" in question
            else _generate(model, **question)
        )
        print(json.dumps(answer), flush=True)


def _generate(model: Any, generate: list[list[int]], max_new_tokens: int) -> dict[str, Json]:
    import torch

    ids_BL = torch.tensor(generate)
    began, cpu = time.perf_counter(), time.process_time()
    model.generate(
        ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        min_new_tokens=max_new_tokens,
        max_new_tokens=max_new_tokens,
    )
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def _score(model: Any, ids: list[int]) -> dict[str, Json]:
    import torch

    with torch.no_grad():
        logits_LV = model(torch.tensor([ids])).logits[0, :-1].double()
    logprobs_L = torch.log_softmax(logits_LV, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {"logprobs": logprobs_L.tolist()}


if __name__ == "__main__":
    main()
