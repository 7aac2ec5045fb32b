"""SGLang's drafts on a CPU, and their record."""

import json
import os
from pathlib import Path
from typing import Any

import torch


def patch() -> None:
    """Let drafts run on a CPU, and an MTP module be dense, as the config says: SGLang's experts need its kernels."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer

    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    torch.cuda.synchronize = lambda *_: None  # SGLang calls it on CPUs, too
    is_sparse = DeepseekV2DecoderLayer._is_layer_sparse
    DeepseekV2DecoderLayer._is_layer_sparse = staticmethod(
        lambda config, layer_id, is_nextn: is_sparse(config, config.num_hidden_layers if is_nextn else layer_id, False)
    )


def record() -> None:
    """Write each request's prompt, its number of tokens, and the drafts after them."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    draft = EagleDraftWorker.draft

    def recorded(self: Any, batch: Any, **options: Any) -> Any:
        known = (batch.seq_lens + 1).tolist()
        verify = draft(self, batch, **options)
        drafts = verify.draft_token.view(len(known), -1)[:, 1:].tolist()
        with Path(os.environ["SGLANG_TEST_DRAFTS"]).open("a") as file:
            for request, num_known, tokens in zip(batch.reqs, known, drafts, strict=True):
                line = {"prompt": list(request.origin_input_ids), "known": num_known, "drafts": tokens}
                file.write(json.dumps(line) + "\n")
        return verify

    EagleDraftWorker.draft = recorded
