"""SGLang's engine over batches of prompts, a request aborted before the last: `serve.py job.json result.json`."""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import sglang

    job, result = map(Path, sys.argv[1:])
    asked = json.loads(job.read_text())
    engine = sglang.Engine(**asked["engine"])
    with Path(os.environ["SGLANG_TEST_CALLS"]).open("a") as calls:
        calls.write("started\n")
    served = []
    for prompts in asked["batches"]:
        if len(served) == len(asked["batches"]) - 1:
            assert abort(engine, prompts[-1]) == "abort"
        params = {"max_new_tokens": asked["max_new_tokens"], "temperature": 0, "ignore_eos": True}
        served.append(engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True))
    outputs = [
        [
            {
                "tokens": request["output_ids"],
                "logprobs": [logprob for logprob, *_ in request["meta_info"]["output_token_logprobs"]],
                "steps": request["meta_info"].get("spec_verify_ct", 0),
                "cached": request["meta_info"]["cached_tokens"],
            }
            for request in batch
        ]
        for batch in served
    ]
    result.write_text(json.dumps(outputs))
    engine.shutdown()


def abort(engine: Any, prompt: list[int]) -> str:
    """Abort a request after its first token; return how it is said to have finished."""
    params = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    stream = engine.generate(input_ids=prompt, sampling_params=params, stream=True, rid="aborted")
    next(stream)
    engine.tokenizer_manager.abort_request("aborted")
    *_, last = stream
    return last["meta_info"]["finish_reason"]["type"]


if __name__ == "__main__":
    main()
