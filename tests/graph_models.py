"""Graphs of nodes and edges, tables that are looked up, sequences that are walked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]
NODES, EDGES, WIDTH, BATCH, LENGTH = 48, 128, 16, 8, 6


def edges() -> dict[str, Tensor]:
    return {
        "x": torch.randn(NODES, WIDTH),
        "source": torch.randint(0, NODES, (EDGES,)),
        "target": torch.randint(0, NODES, (EDGES,)),
        "y": torch.randint(0, 4, (NODES,)),
    }


class Messages(nn.Module):
    """Two layers of messages over edges, summed into nodes by `into`, divided by how many arrive."""

    def __init__(self, into: Callable[[Tensor, Tensor, int], Tensor], mean: bool = False) -> None:
        super().__init__()
        self.into, self.mean = into, mean
        self.message = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat([x[source], x.index_select(0, target)], -1)))
            arrived = self.into(sent, target, x.shape[0])
            if self.mean:
                ones = torch.ones(target.shape[0], 1, dtype=x.dtype, device=x.device)
                arrived = arrived / self.into(ones, target, x.shape[0]).clamp(min=1)
            x = F.relu(update(torch.cat([x, arrived], -1)))
        return F.cross_entropy(self.head(x), y)


def _index_add(sent: Tensor, target: Tensor, num: int) -> Tensor:
    return torch.zeros(num, sent.shape[1], dtype=sent.dtype, device=sent.device).index_add(0, target, sent)


def _index_add_in_place(sent: Tensor, target: Tensor, num: int) -> Tensor:
    return sent.new_zeros(num, sent.shape[1]).index_add_(0, target, sent)


def _scatter_add(sent: Tensor, target: Tensor, num: int) -> Tensor:
    made = torch.zeros(num, sent.shape[1], dtype=sent.dtype, device=sent.device)
    return made.scatter_add(0, target[:, None].expand_as(sent), sent)


def _scatter_reduce(how: str) -> Callable[[Tensor, Tensor, int], Tensor]:
    def into(sent: Tensor, target: Tensor, num: int) -> Tensor:
        made = torch.zeros(num, sent.shape[1], dtype=sent.dtype, device=sent.device)
        index = target[:, None].expand_as(sent)
        return made.scatter_reduce(0, index, sent, reduce=how, include_self=how == "sum")

    return into


def _index_put(sent: Tensor, target: Tensor, num: int) -> Tensor:
    return sent.new_zeros(num, sent.shape[1]).index_put((target,), sent, accumulate=True)


class GraphAttention(nn.Module):
    """A softmax over the edges that arrive at a node (GAT): maxima and sums by node, looked up by edge."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        score = F.leaky_relu(self.score(torch.cat([x[source], x[target]], -1)), 0.2)
        index = target[:, None].expand_as(score)
        most = score.new_full((NODES, 2), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - most[target]).exp()
        total = weight.new_zeros(NODES, 2).scatter_add(0, index, weight)
        sent = (self.value(x)[source].unflatten(-1, (2, -1)) * (weight / total[target])[..., None]).flatten(1)
        return F.cross_entropy(self.head(sent.new_zeros(NODES, WIDTH).index_add(0, target, sent)), y)


class Normed(nn.Module):
    """Weights of edges by the degrees of both ends (GCN), and a readout of every graph of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        degree = torch.zeros(NODES, dtype=x.dtype).scatter_add_(0, target, torch.ones(EDGES, dtype=x.dtype))
        scale = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
        sent = (scale[source] * scale[target])[:, None] * self.layer(x)[source]
        x = F.relu(torch.zeros_like(x).index_add(0, target, sent))
        pooled = x.new_zeros(4, WIDTH).index_add(0, graph, x)
        return F.cross_entropy(self.head(pooled), y)


def _normed() -> Built:
    given = edges() | {"graph": torch.arange(NODES) % 4, "y": torch.randint(0, 4, (4,))}
    return Normed(), given


class Tables(nn.Module):
    """A recommendation model: tables, dense features, dot products of all pairs (DLRM)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        rows = (160, 96, 256)
        mode = "sum" if kind == "sum" else "mean"
        made = nn.Embedding if kind == "one" else lambda r, d: nn.EmbeddingBag(r, d, mode=mode)
        self.tables = nn.ModuleList(made(r, WIDTH) for r in rows)
        self.dense = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU())
        self.top = nn.Linear(WIDTH + 6, 1)
        self.pairs = nn.Buffer(torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, label: Tensor, offsets: Tensor | None = None) -> Tensor:
        x = self.dense(dense)
        looked_up = [
            table(sparse[:, i]) if offsets is None else table(sparse[i], offsets[i])
            for i, table in enumerate(self.tables)
        ]
        z = torch.stack([x, *looked_up], 1)
        products = torch.bmm(z, z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), label)


def _tables(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        shape = (BATCH, 3) if kind == "one" else (BATCH, 3, 5)
        given = {"dense": torch.randn(BATCH, 12), "sparse": torch.randint(0, 96, shape)}
        return Tables(kind), given | {"label": torch.randint(0, 2, (BATCH,)).float()}

    return build


def _bags() -> Built:
    """Bags of any length in one row of ids, with where each begins."""
    starts = torch.tensor([0, 3, 3, 7, 12, 13, 20, 22])
    given = {"dense": torch.randn(BATCH, 12), "sparse": torch.randint(0, 96, (3, 24)), "offsets": starts.expand(3, -1)}
    return Tables("sum"), given | {"label": torch.randint(0, 2, (BATCH,)).float()}


class Weighted(nn.Module):
    """A bag with a weight of each of its ids, and ids that are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(40, WIDTH, mode="sum", padding_idx=0)
        self.most = nn.EmbeddingBag(40, WIDTH, mode="max")
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, ids: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([self.table(ids, per_sample_weights=weights), self.most(ids)], -1)
        return F.cross_entropy(self.head(x), y)


def _weighted() -> Built:
    ids, weights = torch.randint(0, 40, (BATCH, 5)), torch.rand(BATCH, 5)
    return Weighted(), {"ids": ids, "weights": weights, "y": torch.randint(0, 4, (BATCH,))}


class Recurrent(nn.Module):
    """Words, a recurrent net, a word to each place."""

    def __init__(self, net: nn.RNNBase) -> None:
        super().__init__()
        self.net = net
        self.table = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(net.hidden_size * (2 if net.bidirectional else 1), 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.net(self.table(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _recurrent(net: Callable[..., nn.RNNBase], **kwargs: Any) -> Callable[[], Built]:
    def build() -> Built:
        shape = (BATCH, LENGTH) if kwargs.get("batch_first") else (LENGTH, BATCH)
        given = {"ids": torch.randint(0, 20, shape), "labels": torch.randint(0, 20, shape)}
        return Recurrent(net(WIDTH, WIDTH, **kwargs)), given

    return build


class Cells(nn.Module):
    """A loop over the cell of an LSTM or a GRU, from a state that is given."""

    def __init__(self, lstm: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH) if lstm else nn.GRUCell(WIDTH, WIDTH)
        self.lstm, self.head = lstm, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        c = torch.zeros_like(h)
        for step in range(x.shape[1]):
            if self.lstm:
                h, c = self.cell(x[:, step], (h, c))
            else:
                h = self.cell(x[:, step], h)
        return F.cross_entropy(self.head(h), y)


def _cells(lstm: bool) -> Callable[[], Built]:
    def build() -> Built:
        x, h = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, WIDTH)
        return Cells(lstm), {"x": x, "h": h, "y": torch.randint(0, 4, (BATCH,))}

    return build


class Lengths(nn.Module):
    """Rows of different lengths, packed for an LSTM and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.tensor([6, 6, 5, 5, 4, 3, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return F.cross_entropy(self.head(made[:, 0]), y)


def _lengths() -> Built:
    return Lengths(), {"x": torch.randn(BATCH, LENGTH, WIDTH), "y": torch.randint(0, 4, (BATCH,))}


MESSAGES: dict[str, Callable[[], Built]] = {
    "index_add": lambda: (Messages(_index_add, mean=True), edges()),
    "index_add_": lambda: (Messages(_index_add_in_place), edges()),
    "scatter_add": lambda: (Messages(_scatter_add, mean=True), edges()),
    "scatter_reduce sum": lambda: (Messages(_scatter_reduce("sum")), edges()),
    "scatter_reduce mean": lambda: (Messages(_scatter_reduce("mean")), edges()),
    "scatter_reduce amax": lambda: (Messages(_scatter_reduce("amax")), edges()),
    "index_put": lambda: (Messages(_index_put), edges()),
    "graph attention": lambda: (GraphAttention(), edges()),
    "graph convolution": _normed,
}
TABLES: dict[str, Callable[[], Built]] = {
    "tables": _tables("one"),
    "bags of sums": _tables("sum"),
    "bags of means": _tables("mean"),
    "bags by offset": _bags,
    "weighted bags": _weighted,
}
RECURRENT: dict[str, Callable[[], Built]] = {
    "lstm": _recurrent(nn.LSTM, batch_first=True),
    "lstm, two layers": _recurrent(nn.LSTM, num_layers=2),
    "lstm, both ways": _recurrent(nn.LSTM, batch_first=True, bidirectional=True),
    "lstm, no bias": _recurrent(nn.LSTM, num_layers=2, bias=False),
    "gru": _recurrent(nn.GRU, batch_first=True),
    "rnn": _recurrent(nn.RNN, batch_first=True, num_layers=2),
    "lstm cells": _cells(True),
    "gru cells": _cells(False),
    "lstm, packed": _lengths,
}
