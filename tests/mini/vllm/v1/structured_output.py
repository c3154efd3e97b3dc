class StructuredOutputManager:
    def __init__(self, vllm_config):
        pass
