"""Hidden states through vLLM's public API: `LLM` with a worker class of ours, at the speed of prefill.

touchpoints.py what it uses of vLLM, as data; agreement.py: does this vLLM take it
engine.py     in the user's process: builds the engine, hands rows in, hears which are durable
worker.py     vLLM's own worker of this platform, with a stream beside it
taps.py       where states leave the model: hooks that call one custom op, eager or compiled
staging.py    buffers: written by the taps, copied off the device while the next step runs
assembly.py   steps to whole rows; each row's token ids and positions are proved
stream.py     the three together: one step in, finished rows out, on threads of their own
rowfile.py    a row as a safetensors file without copies
watch.py      a process of the engine that died ends the wait for it
text_only.py  a multimodal model without its processor of pictures
spool.py      a sink for callers that want the rows themselves
generator.py  speculators' generator class, for releases that no longer have one
"""
