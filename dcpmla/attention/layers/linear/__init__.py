"""Linear attention, whose memory is a state of fixed size per request, and models that mix its layers with MLA."""
