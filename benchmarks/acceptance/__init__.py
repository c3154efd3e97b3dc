"""A draft that was trained on its model's own answers, in a server: is it accepted, and does the check matter?"""
