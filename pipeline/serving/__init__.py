"""What a vLLM release does with an EAGLE-3 draft, told before any model is loaded."""
