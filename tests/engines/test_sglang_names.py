"""The names of SGLang that the plug-in takes, in every release that it says it runs with: what moved is named here."""

import ast
import re
from pathlib import Path

import pytest

from dcpmla.integrations.sglang import SUPPORTED
from tests.engines.sglang_tree import OLDEST, VERSION, sglang_path
from tests.engines.vllm_names import Name, definitions, member_of, source
from tests.support.sources import metadata

# File under sglang/srt -> functions, and the arguments that they must take, in this order, after self.
FUNCTIONS = {
    "layers/attention/attention_registry.py": {"register_attention_backend": ["name"]},
    "models/deepseek_common/attention_backend_handler.py": {
        "AttentionBackendRegistry.register": ["backend_name", "handler_func"]
    },
    "layers/attention/base_attn_backend.py": {
        "AttentionBackend.init_forward_metadata_out_graph": ["forward_batch", "in_capture"],
        "AttentionBackend.init_forward_metadata_in_graph": ["forward_batch"],
        "AttentionBackend.init_cuda_graph_state": ["max_bs", "max_num_tokens"],
        "AttentionBackend.get_cuda_graph_seq_len_fill_value": [],
        "AttentionBackend.verify_mask": [],
        "AttentionBackend.update_verify_buffers_to_fill_after_draft": ["spec_info", "cuda_graph_bs"],
        "AttentionBackend.forward_decode": ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
        "AttentionBackend.forward_extend": ["q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
    },
    "mem_cache/memory_pool.py": {
        "KVWriteLoc.for_batch": ["forward_batch"],
        "MLATokenToKVPool.get_key_buffer": ["layer_id"],
        "MLATokenToKVPool.set_mla_kv_buffer": ["layer", "loc_info", "cache_k_nope", "cache_k_rope"],
    },
    "managers/scheduler.py": {
        "Scheduler.run_batch": ["batch"],
        "Scheduler.process_batch_result": ["batch", "result"],
    },
    "mem_cache/kv_cache_configurator.py": {"KVCacheConfigurator.loc_space_scale": []},
    "model_executor/cuda_graph_config.py": {"check_cuda_graph_backend": ["phase", "backend"]},
    "speculative/draft_utils.py": {
        "DraftBackendFactory.create_decode_backend": [],
        "DraftBackendFactory.create_draft_extend_backend": [],
    },
    "model_executor/forward_batch_info.py": {
        "ForwardMode.is_decode": [],
        "ForwardMode.is_target_verify": [],
        "ForwardMode.is_draft_extend_v2": [],
        "ForwardMode.is_extend_without_speculative": [],
    },
    "runtime_context.py": {"attention_backends": [], "get_parallel": [], "get_spec": []},
    "models/deepseek_v2.py": {"DeepseekV2ForCausalLM.prepare_context_parallel_metadata_for_dcp": ["seq_lens"]},
}
# What else is read or set, where SGLang does.
LINES = {
    "arg_groups/choices.py": [r"^add_attention_backend_choices = ATTENTION_BACKEND_CHOICES\.extend$"],
    "plugins/__init__.py": [r'^GENERAL_PLUGINS_GROUP = "sglang\.srt\.plugins"$'],
    "layers/attention/attention_registry.py": [r"^ATTENTION_BACKENDS = \{\}"],
    "models/deepseek_common/attention_forward_methods/forward_methods.py": [r"^    MHA = ", r"^    MLA = "],
    "models/deepseek_common/attention_forward_methods/forward_mha.py": [
        r"q=q,\s+q_pe=q_pe,\s+kv_a=kv_a,\s+k_pe=k_pe,\s+positions=positions,\s+layer=self,\s+forward_batch=forward_batch,"
    ],
    "models/deepseek_common/attention_forward_methods/forward_mla.py": [r"^        if self\.dcp_size == 1:"],
    "models/deepseek_v2.py": [r"self\.dcp_size = \(", r"self\.attn_mqa = RadixAttention\("],
    "layers/attention/verify_mask.py": [
        r"import TreeMaskMode",
        r"    buffer: torch\.Tensor\n    mode: TreeMaskMode\n    max_bs: int\n    is_read: bool",
    ],
    "speculative/eagle_utils.py": [r"TreeMaskMode\.QLEN_ONLY"],
    "speculative/eagle_worker_v2.py": [
        r"attn_backend=self\.draft_attn_backend\.attn_backends\[i\]",
        r"self\.draft_attn_backend\.init_forward_metadata\(",
    ],
    "speculative/eagle_worker_common.py": [
        r"forward_batch\.seq_lens \+ num_draft_tokens",
        r"draft_model_runner\.attn_backend\.init_forward_metadata\(",
    ],
    "speculative/eagle_draft_cuda_graph_runner.py": [
        r"self\.draft_attn_backend\.init_forward_metadata_in_graph\(",
    ],
    "arg_groups/fields/spec.py": [
        rf"^ *{name}:"
        for name in (
            "speculative_algorithm",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "speculative_draft_attention_backend",
            "speculative_adaptive",
            "enable_multi_layer_eagle",
        )
    ],
    "model_executor/runner/eager_runner.py": [r"model_runner\.model\.prepare_context_parallel_metadata_for_dcp\("],
    "model_executor/runner/decode_cuda_graph_runner.py": [r"attn_backend\.init_forward_metadata_in_graph\("],
    "managers/scheduler.py": [
        r"self\.enable_overlap = ",
        r"self\.forward_stream_ctx: CudaStreamContext = ",
        r"^                with self\.forward_stream_ctx:",
    ],
    "mem_cache/kv_index_translator.py": [r"self\.is_translating = "],
}


@pytest.mark.parametrize("release", SUPPORTED)
def test_what_the_plug_in_takes_is_there(release: str) -> None:
    tree, moved = Path(sglang_path(release)[0]), []
    for file, wanted in FUNCTIONS.items():
        module = "sglang.srt." + file.removesuffix(".py").replace("/", ".")
        for name, arguments in wanted.items():
            owner, _, method = name.rpartition(".")
            function = member_of(tree, Name(module, owner), method) if owner else definitions(tree, module).get(name)
            taken = function.args.args if isinstance(function, ast.FunctionDef) else []
            found = [each.arg for each in taken if each.arg not in ("self", "cls")]
            if function is None or found[: len(arguments)] != arguments:
                moved.append(f"{file}: {name}({', '.join(arguments)}), found {found}")
    for file, lines in LINES.items():
        text = source(tree, "sglang.srt." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")) or ""
        moved += [f"{file}: {line}" for line in lines if not re.search(line, text, re.MULTILINE)]
    assert not moved, "\n".join(moved)


def test_the_release_of_the_tests_is_supported_and_declared() -> None:
    assert SUPPORTED == (OLDEST, VERSION)
    following = VERSION.rpartition(".")[0] + f".{int(VERSION.rpartition('.')[2]) + 1}"
    assert metadata()["optional-dependencies"]["sglang"] == [f"sglang>={OLDEST},<{following}"]
