"""Layers other than MLA over the whole context: windows, pools of tokens, compressed entries, linear attention."""
