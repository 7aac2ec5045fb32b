"""SGLang's engine over batches of prompts: `serve.py job.json result.json`."""

import json
import sys
from pathlib import Path


def main() -> None:
    import sglang

    job, result = map(Path, sys.argv[1:])
    asked = json.loads(job.read_text())
    engine = sglang.Engine(**asked["engine"])
    served = []
    for prompts in asked["batches"]:
        params = {"max_new_tokens": asked["max_new_tokens"], "temperature": 0, "ignore_eos": True}
        served.append(engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True))
    outputs = [
        [
            {
                "tokens": request["output_ids"],
                "logprobs": [logprob for logprob, *_ in request["meta_info"]["output_token_logprobs"]],
                "cached": request["meta_info"]["cached_tokens"],
            }
            for request in batch
        ]
        for batch in served
    ]
    result.write_text(json.dumps(outputs))
    engine.shutdown()


if __name__ == "__main__":
    main()
