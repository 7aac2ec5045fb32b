"""MTP modules in plain torch, around transformers' own attention and experts."""

from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dcpmla.integrations.families.table import family_of
from tests.support.models import random_model, tiny_config


class MtpNames(NamedTuple):
    """Names of a module's weights as published."""

    block: str
    mlp: str
    embedding_norm: str
    hidden_norm: str
    projections: tuple[str, ...]
    output_norm: str
    collapse: str = ""
    embedding: str = ""

    @classmethod
    def of(cls, config: Any) -> Self:
        if config.model_type == "longcat_flash":
            block = "model.mtp.layers.0"
            norms, mlp = (f"{block}.enorm.m.weight", f"{block}.hnorm.m.weight"), f"{block}.transformer_layer.mlp"
            return cls(block, mlp, *norms, (f"{block}.eh_proj.weight",), "model.mtp.norm.weight")
        is_v4, is_hy = config.model_type == "deepseek_v4", config.model_type == "hy_v4"
        prefix = "model.language_model" if config.model_type == "glm5_next_text" else "model"
        block = "mtp.0" if is_v4 else "model.mtp_layers.0" if is_hy else f"{prefix}.layers.{config.num_hidden_layers}"
        own = f"{block}.mlp", f"{block}.enorm.weight", f"{block}.hnorm.weight"
        if is_v4:
            projections = f"{block}.e_proj.weight", f"{block}.h_proj.weight"
            return cls(block, *own, projections, f"{block}.norm.weight", f"{block}.hc_head_")
        is_final = config.model_type in ("hy_v4", "bailing_hybrid")
        last = f"{block}.final_layernorm.weight" if is_final else f"{block}.shared_head.norm.weight"
        embedding = "model.mtp.embed_tokens.weight" if config.model_type == "dots3_note_text" else ""
        return cls(block, *own, (f"{block}.eh_proj.weight",), last, embedding=embedding)

    def all(self) -> list[str]:
        collapse = [self.collapse + part for part in ("fn", "base", "scale")] if self.collapse else []
        embedding = [self.embedding] if self.embedding else []
        return [self.embedding_norm, self.hidden_norm, *self.projections, self.output_norm, *collapse, *embedding]


def _text_model(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


class PlainMtp:
    """The report's module: norms of the embedding and of the hidden state, a projection of both, a decoder layer.

    Attributes:
        masks_first: Whether the embedding of the first position is zero, as in vLLM: "not needed by MTP".
    """

    masks_first = False

    def __init__(self, family: str, **fields: Any) -> None:
        torch.manual_seed(1)
        self.config = tiny_config(family)
        for name, value in {"num_nextn_predict_layers": 1, **fields}.items():
            setattr(self.config, name, value)
        self.with_layer = random_model(family_of(self.config).with_mtp_layer(self.config))
        self.base = random_model(self.config, seed=0)
        state = self.with_layer.state_dict()
        self.base.load_state_dict({name: state[name] for name in self.base.state_dict()})
        self.use_layer()
        num_layers = self.config.num_hidden_layers
        shapes = family_of(self.config).mtp_shapes(self.config, f"model.layers.{num_layers}", {})
        published = {family_of(self.config).module_name(name, num_layers): name for name in self.names.all()}
        self.own = {
            published[name]: torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.2
            for name, shape in shapes.items()
            if "_layernorm" not in name
        }

    def use_layer(self) -> None:
        """Use the parts of the last layer, and the names of the config."""
        layer, self.names = _text_model(self.with_layer).layers[-1], MtpNames.of(self.config)
        if self.config.model_type == "longcat_flash":  # any of its layers has the parts of the module's, twice
            parts = layer.self_attn[0], layer.mlps[0], layer.input_layernorm[0], layer.post_attention_layernorm[0]
        else:
            parts = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        self.attention, self.mlp, self.first_norm, self.second_norm = parts

    def agree(self, share: float) -> Self:
        """Let branches of the residual add so little that the module's drafts are often the model's tokens."""
        for model in (self.base, self.with_layer):
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    weight.data *= share
        names, size = self.names, self.config.hidden_size
        self.own[names.projections[0]] = torch.eye(size, 2 * size)
        self.own[names.embedding_norm] = torch.ones(size)
        self.own[names.output_norm] = _text_model(self.base).norm.weight.data.clone()
        if names.embedding:
            self.own[names.embedding] = _text_model(self.base).embed_tokens.weight.data.clone()
        return self

    def save(self, directory: Path) -> Path:
        """Write it as checkpoints are published."""
        state = self.with_layer.state_dict() | self.own
        if self.config.model_type == "longcat_flash":
            modules = {f"{self.names.block}.self_attn": self.attention, self.names.mlp: self.mlp}
            modules |= {f"{self.names.block}.input_layernorm": self.first_norm}
            modules |= {f"{self.names.block}.post_attention_layernorm": self.second_norm}
            state = self.base.state_dict() | self.own
            state |= {
                f"{name}.{key}": value for name, part in modules.items() for key, value in part.state_dict().items()
            }
        if self.config.model_type in ("deepseek_v4", "hy_v4"):
            block = f"model.layers.{self.config.num_hidden_layers}."
            state = {name.replace(block, f"{self.names.block}."): tensor for name, tensor in state.items()}
        if self.config.model_type == "bailing_hybrid":
            published = {".self_attn.": ".attention.", ".o_proj.": ".dense.", ".e_score_correction_": ".expert_"}
            for word, other in published.items():
                state = {name.replace(word, other): tensor for name, tensor in state.items()}
        directory.mkdir()
        self.config.dtype = torch.float32
        self.config.save_pretrained(directory)
        save_file({name: tensor.clone() for name, tensor in state.items()}, directory / "model.safetensors")
        return directory

    @torch.no_grad()
    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft after tokens, with all of the module's states computed anew each time."""
        hidden = self.base.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        tokens = list(tokens)
        for _ in range(num_drafts):
            out = self._run(torch.tensor([tokens[1:]]), hidden)
            tokens.append(int(self.base.lm_head(out[0, -1]).argmax()))
            hidden = torch.cat([hidden, out[:, -1:]], 1)
        return tokens[-num_drafts:]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        own = self.own.get(self.names.embedding)
        embedded = _text_model(self.base).embed_tokens(tokens) if own is None else F.embedding(tokens, own)
        embedded = self._norm(embedded, self.names.embedding_norm)
        joined = torch.cat([embedded, self._norm(hidden, self.names.hidden_norm)], -1)
        residual = joined @ self.own[self.names.projections[0]].T
        residual = residual + self.attention(self.first_norm(residual), **self._arguments(residual))[0]
        return self._norm(residual + self.mlp(self.second_norm(residual)), self.names.output_norm)

    def _arguments(self, x: Tensor) -> dict[str, Any]:
        """Return the arguments of transformers' attention, besides hidden states [1, T, hidden]."""
        size, rotary = x.shape[1], getattr(_text_model(self.base), "rotary_emb", None)
        if rotary is None:  # GLM-5-Next's indexer masks by itself
            return {"attention_mask": torch.ones(1, size, dtype=torch.bool)}
        positions, types = torch.arange(size)[None], {}
        is_hidden = torch.ones(size, size).triu(1).bool()
        if self.config.model_type == "dots3_note_text":
            types = {"layer_type": self.with_layer.config.layer_types[-1]}
            if types["layer_type"] == "sliding_attention":
                is_hidden |= positions.T - positions >= self.config.sliding_window
        mask = torch.zeros(size, size).masked_fill(is_hidden, -torch.inf)[None, None]
        angles = rotary(x, positions, **types)
        return {"attention_mask": mask, "position_embeddings": angles, "position_ids": positions}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        out = F.rms_norm(x, x.shape[-1:], self.own[name], self.config.rms_norm_eps)
        if self.masks_first and name == self.names.embedding_norm:
            out[:, 0] = 0
        return out


class PlainStreamMtp(PlainMtp):
    """DeepSeek-V4's module, by its published code: the embedding and each stream of the residual through projections of
    their own, and a decoder layer over their sum.
    """

    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        seen: list[Tensor] = []
        hook = self.base.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            self.base(torch.tensor([tokens]))
            hook.remove()
            streams, tokens = seen[0][:, :-1], list(tokens)
            for _ in range(num_drafts):
                out = self._run(torch.tensor([tokens[1:]]), streams)
                tokens.append(int(self.base.lm_head(self._collapse(out)[0, -1]).argmax()))
                streams = torch.cat([streams, out[:, -1:]], 1)
        return tokens[-num_drafts:]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        of_embedding, of_stream = (self.own[name] for name in self.names.projections)
        embedded = self._norm(self.base.model.embed_tokens(tokens), self.names.embedding_norm) @ of_embedding.T
        streams = embedded[:, :, None] + self._norm(hidden, self.names.hidden_norm) @ of_stream.T
        positions = torch.arange(tokens.shape[1])[None]
        distance = positions[0][:, None] - positions
        is_seen = (distance >= 0) & (distance < self.config.sliding_window)
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        rotary = self.base.model.rotary_emb
        angles = {kind: rotary(embedded, positions, layer_type=kind) for kind in ("main", "compress")}
        layer = self.with_layer.model.layers[-1]
        out: Tensor = layer(streams, position_embeddings=angles, position_ids=positions, attention_mask=mask)
        return out

    def _collapse(self, streams: Tensor) -> Tensor:
        fn, base, scale = (self.own[self.names.collapse + part] for part in ("fn", "base", "scale"))
        flat = streams.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weights = torch.sigmoid(flat @ fn.T * scale + base) + self.config.hc_eps
        return self._norm((weights[..., None] * streams).sum(2), self.names.output_norm)


def plain_module(family: str) -> PlainMtp:
    return PlainStreamMtp(family) if family == "deepseek_v4" else PlainMtp(family)
