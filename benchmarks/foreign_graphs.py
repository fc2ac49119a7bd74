"""torch-geometric: its convolutions on one small graph of 12 nodes, classified nodes or pooled graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_check import Foreign
from benchmarks.foreign_losses import far

NODES, FEATURES, EDGES, HIDDEN, CLASSES = 12, 8, 30, 16, 4
BASIC = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
CONVOLUTIONS = (
    "GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "GraphConv", "GatedGraphConv", "ResGatedGraphConv",
    "TransformerConv", "TAGConv", "SGConv", "APPNP", "ARMAConv", "ClusterGCNConv", "FeaStConv", "HypergraphConv",
    "LEConv", "GENConv", "FiLMConv", "SuperGATConv", "EGConv", "GeneralConv", "LGConv", "ChebConv", "MFConv",
)  # fmt: skip


class _Nodes(nn.Module):
    """Two convolutions and a classifier, as its introduction has them."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.first = make(FEATURES, HIDDEN)
        self.second = make(width, HIDDEN)
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x, edge_index).relu(), training=self.training)
        scores: Tensor = self.classes(self.second(x, edge_index).relu())
        return scores


class _Pooled(nn.Module):
    """A graph's features pooled: samples are graphs."""

    def __init__(self, net: nn.Module, pool: Any) -> None:
        super().__init__()
        self.net = net
        self.pool = pool
        self.classes = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        scores: Tensor = self.classes(self.pool(self.net(x, edge_index), batch, 3))
        return scores


def models() -> dict[str, Callable[[], Foreign]]:
    found: dict[str, Callable[[], Foreign]] = {name: partial(_basic, name) for name in BASIC}
    found |= {name: partial(_convolution, name) for name in CONVOLUTIONS}
    found |= {f"GCN, {pool} pooled": partial(_pooled, f"global_{pool}_pool") for pool in ("mean", "add", "max")}
    found |= {f"{name}, graph known": partial(_known_graph, name) for name in ("GCN", "GAT")}
    return found | {
        "RGCNConv": _relational,
        "SchNet": _schnet,
        "GCN, batch norm": partial(_basic, "GCN", norm="BatchNorm"),
    }


def _graph() -> tuple[Tensor, Tensor]:
    return torch.randn(NODES, FEATURES), torch.randint(NODES, (2, EDGES))


def _basic(name: str, **own: Any) -> Foreign:
    from torch_geometric.nn import models

    if name == "PNA":
        own = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
        own["deg"] = torch.tensor([1, 3, 4, 3, 1])
    model = getattr(models, name)(FEATURES, HIDDEN, num_layers=2, out_channels=CLASSES, dropout=0.2, **own)
    return Foreign(model=model, inputs=_graph, loss_fn=far)


def _convolution(name: str) -> Foreign:
    from torch_geometric import nn as pyg

    kind, own = getattr(pyg, name), {}
    if name in ("GATConv", "GATv2Conv", "TransformerConv"):
        own = {"heads": 2, "concat": False, "dropout": 0.1}
    width = FEATURES if name in ("APPNP", "LGConv") else HIDDEN

    def make(inputs: int, outputs: int) -> nn.Module:
        if name == "APPNP":
            made: nn.Module = kind(3, 0.1)
        elif name == "LGConv":
            made = kind()
        elif name == "GatedGraphConv":
            made = kind(outputs, 2)
        elif name in ("ChebConv",):
            made = kind(inputs, outputs, 2)
        else:
            made = kind(inputs, outputs, **own)
        return made

    return Foreign(model=_Nodes(make, width), inputs=_graph, loss_fn=far)


def _pooled(pool: str) -> Foreign:
    from torch_geometric import nn as pyg

    net = pyg.models.GCN(FEATURES, HIDDEN, num_layers=2)
    batch = torch.arange(NODES) // 4
    return Foreign(model=_Pooled(net, getattr(pyg, pool)), inputs=lambda: (*_graph(), batch), loss_fn=far)


class _OneGraph(nn.Module):
    """A graph that is the same in every step, as in the citation benchmarks."""

    def __init__(self, net: nn.Module, edge_index: Tensor) -> None:
        super().__init__()
        self.net = net
        self.edge_index = edge_index

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x, self.edge_index)
        return out


def _known_graph(name: str) -> Foreign:
    net, edges = _basic(name).model, _graph()[1]
    return Foreign(model=_OneGraph(net, edges), inputs=lambda: (torch.randn(NODES, FEATURES),), loss_fn=far)


class _Typed(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out: Tensor = self.convolution(x, edge_index, edge_type)
        return out


def _relational() -> Foreign:
    from torch_geometric.nn import RGCNConv

    return Foreign(
        model=_Typed(RGCNConv(FEATURES, HIDDEN, 3)), inputs=lambda: (*_graph(), torch.randint(3, (EDGES,))), loss_fn=far
    )


def _schnet() -> Foreign:
    from torch_geometric.nn.models import SchNet

    def every(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.tensor([(i, j) for i in range(NODES) for j in range(NODES) if i != j and i // 4 == j // 4]).t()
        return pairs, (positions[pairs[0]] - positions[pairs[1]]).norm(dim=-1)

    model = SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=every)
    return Foreign(
        model=model,
        inputs=lambda: (torch.randint(1, 9, (NODES,)), torch.randn(NODES, 3), torch.arange(NODES) // 4),
        loss_fn=far,
    )
