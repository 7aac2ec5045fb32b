"""Names of the plug-in for SGLang."""

NAME = "dcpmla"  # of the attention backend, as the option takes it
