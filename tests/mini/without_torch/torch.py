"""Stands for torch where a test needs none of it."""


class dtype:
    pass


class cuda:
    @staticmethod
    def mem_get_info():
        raise RuntimeError("no CUDA")

    @staticmethod
    def is_available():
        return False
