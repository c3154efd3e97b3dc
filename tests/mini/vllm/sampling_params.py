class SamplingParams:
    def __init__(self, max_tokens=16, temperature=1.0):
        self.max_tokens = max_tokens
