"""Names of the plug-in for SGLang."""

NAME = "dcpmla"  # the attention backend's value of the option
