"""SGLang's engine over one prompt: `stream.py job.json` prints how many tokens there are as they come."""

import json
import sys
from pathlib import Path


def main() -> None:
    import sglang

    asked = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**asked["engine"])
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    for output in engine.generate(input_ids=[3, 1, 4], sampling_params=params, stream=True):
        print(output["meta_info"]["completion_tokens"], flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
