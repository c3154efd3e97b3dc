"""A decoder, vLLM's two model runners and its worker, in small. Needs torch.

The state after layer i of token t at position p is [t, i + 1, (i + 1) * p], exact in float32: a row says
whose it is and where it was taken.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from mini_scheduler import Output

LAYERS = 6
VOCABULARY = 100


def states_of(prompt: list[int], layer: int) -> list[list[float]]:
    """What a right capture returns for one prompt after one layer."""
    return [[float(t), layer + 1.0, (layer + 1.0) * p] for p, t in enumerate(prompt)]


class Layer(torch.nn.Module):
    """A decoder layer that returns its output in one of the ways that architectures do."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        places = (positions[0] if positions.dim() > 1 else positions).float()
        added = torch.stack([torch.zeros_like(places), torch.ones_like(places), places], dim=-1)
        whole = residual + added
        return {
            "pair": (added, residual),
            "tensor": whole,
            "no residual": (whole, None),
            "alone": (whole,),
            "mapping": {"hidden_states": whole},
            "other shape": (whole, residual[:, :1]),
            "keys and values": (added, residual, (places, places)),
            # As vLLM's own classes do: parts of the state that the next layer adds.
            "residual in the third place": (added, None, residual),
            "residual twice": (whole, residual, None, None),
            "parts in a tuple": (added, (residual, None)),
            "wider, in parts": (torch.cat([whole, whole], -1), added, residual),
        }[self.returns]


class Partial(Layer):
    """Leaves the sum over the devices to the next layer."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        # (vLLM: `self.fused_allreduce(...)`, before the first norm)
        return super().forward(positions, hidden_states, residual)


class Unread(torch.nn.Module):
    """A text model that looks its embedding's weights up without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder("pair", by_position=False)
        table = self.model.embed_tokens
        self._read = lambda ids: table.weight[ids]

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden, residual = self._read(input_ids), None
        for layer in self.model.layers:
            hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
        return hidden + residual


class Stale(Layer):
    """Whole hidden states, and beside them a residual that is added already: it passes over the one it is given."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        return super().forward(positions, hidden_states, None), residual


class Given(Layer):
    """The same, of a layer that is given none."""

    def forward(self, positions: Any, hidden_states: Any) -> Any:  # type: ignore[override]
        return super().forward(positions, hidden_states, None), hidden_states


_OTHERS = {"stale residual": Stale, "residual not taken": Given}


class Decoder(torch.nn.Module):
    def __init__(
        self, returns: str, by_position: bool, layers: str = "layers", embedding: str = "embed_tokens"
    ) -> None:
        super().__init__()
        self.by_position, self._names = by_position, (layers, embedding)
        table = torch.nn.Embedding(VOCABULARY, 3)
        kind = _OTHERS.get(returns, Layer)
        blocks = torch.nn.ModuleList(kind("tensor" if returns in _OTHERS else returns) for _ in range(LAYERS))
        with torch.no_grad():
            table.weight.zero_()
            table.weight[:, 0] = torch.arange(VOCABULARY)
        setattr(self, embedding, table)
        setattr(self, layers, blocks)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        layers, embedding = self._names
        hidden, residual = getattr(self, embedding)(input_ids), None
        for layer in getattr(self, layers):
            if isinstance(layer, Given):
                out = layer(positions, hidden)
            elif self.by_position:
                out = layer(positions, hidden, residual)
            else:
                out = layer(positions=positions, hidden_states=hidden, residual=residual)
            out = tuple(out.values()) if isinstance(out, dict) else out
            if isinstance(layer, (Stale, Given)):
                out = out[0]
            hidden, residual = (out, None) if not isinstance(out, tuple) else (*out, None)[:2]
        return hidden if residual is None else hidden + residual


class TextModel(torch.nn.Module):
    def __init__(self, returns: str = "pair", by_position: bool = False) -> None:
        super().__init__()
        self.model = Decoder(returns, by_position)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class RenamedModel(torch.nn.Module):
    """A model that keeps its parts where other architectures do.

    Args:
        path: of the layers, such as `transformer.h`.
        embedding: name of the token embedding beside them.
    """

    def __init__(self, path: str, embedding: str) -> None:
        super().__init__()
        *outer, layers = path.split(".")
        inner: Any = Decoder("tensor", False, layers, embedding)
        self._inner = [inner]  # in a list: not a member
        for name in reversed(outer[1:]):
            holder = torch.nn.Module()
            setattr(holder, name, inner)
            inner = holder
        setattr(self, outer[0], inner)

    def forward(self, **inputs: Any) -> Any:
        return self._inner[0](**inputs)


class BatchedModel(TextModel):
    """As vLLM runs models of transformers: inside, a batch of one."""

    def __init__(self) -> None:
        super().__init__("tensor", by_position=False)

    def forward(self, **inputs: Any) -> Any:
        return self.model(input_ids=inputs["input_ids"][None], positions=inputs["positions"])


class MultimodalModel(torch.nn.Module):
    """Holds its text model where the capture has to ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = TextModel()

    def get_language_model(self) -> TextModel:
        return self.language_model

    def forward(self, **inputs: Any) -> Any:
        return self.language_model(**inputs)


class _Runner:
    """Args: padding: rows past the last token; axes: rows of positions, 3 as multimodal models have them."""

    def __init__(self, model: Any, padding: int = 0, axes: int = 1) -> None:
        self.model, self.padding, self.axes = model, padding, axes
        self._prompts: dict[str, list[int]] = {}

    def get_model(self) -> Any:
        return self.model

    def _learn(self, output: Output) -> None:
        self._prompts.update({new.req_id: new.prompt_token_ids for new in output.scheduled_new_reqs})

    def _forward(self, order: list[str], output: Output) -> None:
        ids: list[int] = []
        places: list[int] = []
        for name in order:
            rows = range(output.starts[name], output.starts[name] + output.num_scheduled_tokens[name])
            ids += [self._prompts[name][row] for row in rows]
            places += rows
        ids, places = ids + [0] * self.padding, places + [0] * self.padding
        positions = torch.tensor(places)
        if self.axes > 1:
            positions = positions.expand(self.axes, -1)
        with torch.no_grad():
            self.model(input_ids=torch.tensor(ids), positions=positions)


class RunnerV1(_Runner):
    """Keeps one batch, in an order of its own."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.input_batch = SimpleNamespace(req_ids=[])

    def execute_model(self, output: Output) -> None:
        self._learn(output)
        self.input_batch.req_ids = sorted(output.num_scheduled_tokens, reverse=True)
        self._forward(self.input_batch.req_ids, output)


class RunnerV2(_Runner):
    """Makes a batch for each step, sorted by number of tokens."""

    req_states = None

    def execute_model(self, output: Output) -> None:
        self._learn(output)
        self._forward(self.prepare_inputs(output).req_ids, output)

    def prepare_inputs(self, output: Output) -> SimpleNamespace:
        counts = output.num_scheduled_tokens
        return SimpleNamespace(req_ids=sorted(counts, key=lambda name: (counts[name], name)))


RUNNERS = {"v1": RunnerV1, "v2": RunnerV2}


class MiniWorker:
    """What the capture reads of vLLM's worker."""

    def __init__(self, runner: Any, rank: int = 0, devices: int = 1) -> None:
        self.model_runner, self.rank = runner, rank
        self.parallel_config = SimpleNamespace(tensor_parallel_size=devices)
