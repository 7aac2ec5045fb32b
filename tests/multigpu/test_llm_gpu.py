"""The front door on GPUs: answers, and an end in order with decode graphs that hold NCCL's operations."""

import json
from pathlib import Path

from tests.support.gpus import on_gpus
from tests.support.launchers import run_together, torchrun

SCRIPT = """
import json, sys
from dcpmla import LLM, SamplingParams

prompts = ["amber-ant 123; amber-apple 456; amber-ant?", "amber-ant 123; amber-apple 456; amber-apple?"]
with LLM("examples/needle/model", decode_context_parallel_size=int(sys.argv[1]), kv_cache_memory_bytes=1 << 26) as llm:
    results = llm.generate(prompts, SamplingParams(max_new_tokens=4))
    streamed = "".join(text for _, text in llm.stream(prompts[0], SamplingParams(max_new_tokens=4)))
    if llm.rank == 0:
        print(json.dumps([[result.text for result in results], streamed, llm.engine.graph is not None]))
"""


@on_gpus(1, 2)
def test_answers_from_graphs(num_gpus: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (end,) = run_together([(torchrun([script, num_gpus], num_gpus), {})])
    (line,) = [line for line in end.stdout.splitlines() if line.startswith("[")]
    texts, streamed, has_graph = json.loads(line)
    assert [text.split()[0] for text in texts] == ["123", "456"]
    assert streamed == texts[0]
    assert has_graph
