"""Vision-language models that write actions as tokens, in process or through vLLM."""
