"""Names of tensors in checkpoints, and their names in transformers' modules."""

import re

NameRules = tuple[tuple[re.Pattern[str], str], ...]


def name_rules(*rules: tuple[str, str]) -> NameRules:
    """Return rules that apply in this order: patterns, and what replaces them. "{mtp}" there is the number of the MTP
    module's layer. Names of modules stay.
    """
    return tuple((re.compile(pattern), name) for pattern, name in rules)


TEXT_RULES = name_rules(  # of all families
    # a multimodal model around the text model
    (r"^language_model\.(?=model\.|lm_head\.)", ""),
    (r"^model\.language_model\.", "model."),
    # compressed-tensors' packed codes
    (r"\.weight_packed$", ".weight"),
    (r"\.([kq])_proj\.output_scale$", r".\1_scale"),  # a calibrated cache's, and its queries'
    (r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),  # A.X-K1
)
