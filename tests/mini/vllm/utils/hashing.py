def get_hash_fn_by_name(name):
    return hash
