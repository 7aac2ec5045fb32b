"""A small DeepSeek-V3.2, and the comparison of an engine's answers and selections with transformers'."""

import json
from collections.abc import Callable
from functools import partialmethod
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from dcpmla.attention.select.selector import TokenSelector
from tests.engines.conftest import save_random, small_fields
from tests.engines.vllm_drafts import draw_own, make_module

TOPK = 32


def save_sparse_model(
    directory: Path, num_heads: int = 8, head_dim: int = 32, num_layers: int = 2, topk: int = TOPK
) -> Path:
    """Save a model of dense layers whose tokens select at most topk; return its directory."""
    fields = small_fields(num_heads, head_dim, num_layers, num_dense=num_layers)
    indexer = {"index_n_heads": num_heads // 4, "index_head_dim": 128, "index_topk": topk}
    return save_random(DeepseekV32ForCausalLM, DeepseekV32Config(**fields, **indexer), directory)


def save_sparse_model_with_module(directory: Path) -> Path:
    """Save a model of two layers and an MTP module with a third; return its directory."""
    make_module(save_sparse_model(directory, num_layers=3), draw_own())
    config = json.loads((directory / "config.json").read_text())
    del config["layer_types"], config["mlp_layer_types"]  # because they count three layers
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Selections:
    """What an engine selects, and transformers' model over the same selections.

    A rounding to e4m3 decides now and then which of two keys is selected, so answers are compared over the engine's
    selections, and these with the scores of transformers' indexers in e4m3.

    Attributes:
        worst: How far below the best topk a selected key's score is, at most, in parts of the spread of scores.
        num_equal, num_rows: Numbers of tokens with exactly the best keys, and of all.
        num_wrong: Number of tokens with too few keys, or with one twice.
    """

    def __init__(self) -> None:
        self.worst, self.num_equal, self.num_rows, self.num_wrong = 0.0, 0, 0, 0
        # The keys are request, layer and position; then layer and the tokens up to a position.
        self._found: dict[tuple[str, int, int], list[int]] = {}
        self._shared: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._request: tuple[str, list[int]] = "", []

    def record(self) -> None:
        """Record the selections of vLLM's second model runner from now on."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        names: list[str] = []
        layers = count()
        prepare = GPUModelRunner.prepare_inputs

        def prepared(runner: Any, *args: Any, **named: Any) -> Any:
            nonlocal names, layers
            batch = prepare(runner, *args, **named)
            names, layers = [name.rpartition("-")[0] for name in batch.req_ids], count()  # vLLM adds a suffix
            return batch

        def note(tokens: Any, chosen: Tensor) -> None:
            layer = next(layers)
            columns = tokens.request, tokens.seq_lens, chosen
            for request, seen, positions in zip(*(column.tolist() for column in columns), strict=True):
                if names and seen > 0:
                    self._found[names[request], layer, seen - 1] = [position for position in positions if position >= 0]

        GPUModelRunner.prepare_inputs = prepared
        self.watch(note)

    def watch(self, note: Callable[[Any, Tensor], None]) -> None:
        """Call `note` after each selection, with the tokens of the step and the positions that they have selected."""
        select = TokenSelector.select

        def selected(
            selector: Any, q: Tensor, weights: Tensor, keys: Tensor, sparse: Any, table: Tensor, chosen: Any
        ) -> None:
            select(selector, q, weights, keys, sparse, table, chosen)
            note(sparse, chosen.positions)

        TokenSelector.select = selected

    def replace_indexer(self) -> None:
        """Make transformers' model attend to an engine's selections, and compare them with its own."""
        deepseek_v32.DeepseekV32Indexer.forward = partialmethod(_select_again, self)

    def largest_error(self, model: Any, requests: list[list[int]], outputs: list[Any]) -> float:
        """Return the largest difference of any logprob from transformers' over the same selections."""
        self.replace_indexer()
        ended = [(tokens, output) for tokens, output in zip(requests, outputs, strict=True) if output is not None]
        answers = [(output.request_id, tokens + list(output.outputs[0].token_ids)) for tokens, output in ended]
        known = dict(answers)
        for (name, layer, position), positions in self._found.items():
            if name in known:
                self._shared[layer, tuple(known[name][: position + 1])] = positions
        worst = 0.0
        for answer, (tokens, output) in zip(answers, ended, strict=True):
            self._request = answer
            expected = (
                model(torch.tensor([answer[1][:-1]])).logits[0].log_softmax(-1)
            )  # the last token is never computed
            for index, row in enumerate(output.outputs[0].logprobs):
                got = torch.tensor([row[token].logprob for token in range(len(row))])
                worst = max(worst, float((got - expected[len(tokens) - 1 + index]).abs().max()))
        return worst

    def of(self, layer: int, position: int) -> list[int]:
        """Return what a token of the request at hand has selected."""
        name, tokens = self._request
        shared = self._shared.get((layer, tuple(tokens[: position + 1])), [*range(position + 1)])
        return self._found.get((name, layer, position), shared)

    def compare(self, scores: Tensor, chosen: list[int], topk: int) -> None:
        """Note how a selection differs from the best of a token's scores [n]."""
        self.num_rows += 1
        if not chosen:
            self.num_wrong += 1
            return
        best = scores.topk(min(topk, len(scores))).values[-1]
        spread = float(scores.max() - scores.min()) or 1.0
        self.worst = max(self.worst, float(best - scores[chosen].min()) / spread)
        self.num_equal += bool(scores[chosen].min() >= best)
        self.num_wrong += not len(set(chosen)) == len(chosen) == min(topk, len(scores))


def _select_again(
    indexer: Any,
    selections: Selections,
    hidden_states: Tensor,
    q_resid: Tensor,
    angles: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the positions that each token of a prompt selected in an engine; compare them with its scores."""
    rope, topk = indexer.qk_rope_head_dim, indexer.index_topk
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated = deepseek_v32.apply_rotary_pos_emb(q[..., :rope], k[..., :rope], *angles, unsqueeze_dim=2)
    q, k = (rounded_keys(torch.cat([x, y[..., rope:]], -1)) for x, y in zip(rotated, (q, k), strict=True))
    products = torch.einsum("bshd,btd->bsht", q, k.squeeze(2)).relu()
    scores = torch.einsum("bsht,bsh->bst", products, indexer.weights_proj(hidden_states).double())[0]
    rows = []
    for position in range(len(scores)):
        chosen = selections.of(indexer.layer_idx, position)
        selections.compare(scores[position, : position + 1], chosen, topk)
        rows.append(chosen + chosen[:1] * (topk - len(chosen)))
    return torch.tensor([rows], dtype=torch.int32)


def rounded_keys(x: Tensor) -> Tensor:
    """Return rows [.., D] as e4m3 with scales of powers of two has them, float64."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).double() * scale
