"""From conversations to a trained EAGLE-3 draft: prepare, vocab, extract, verify, train.

Each stage is one module that reads what the stage before it wrote and checks that
stage's manifest. Nothing heavy is imported here.
"""
