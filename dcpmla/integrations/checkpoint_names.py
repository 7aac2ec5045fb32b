"""Names of tensors in a checkpoint, and their names in transformers' modules."""

import re
from collections.abc import Sequence

# Rules of most families. They apply in this order; names of modules stay.
TEXT_RULES = [
    (re.compile(pattern), name)
    for pattern, name in (
        # a multimodal model around the text model
        (r"^language_model\.(?=model\.|lm_head\.)", ""),
        (r"^model\.language_model\.", "model."),
        # compressed-tensors' packed codes
        (r"\.weight_packed$", ".weight"),
        (r"\.([kq])_proj\.output_scale$", r".\1_scale"),  # a calibrated cache's, and its queries'
        (r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),  # A.X-K1
    )
]


def rename(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Return a tensor's name after all rules."""
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name
