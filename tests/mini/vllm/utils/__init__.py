from vllm import VERSION

if VERSION < (0, 11, 1):
    __path__ = []  # there is no vllm.utils.hashing

    def get_hash_fn_by_name(name):
        return hash
