"""Which gradients does a data-parallel step of a transformer exchange, and when is each ready?

Seconds are those of `step_time`: the same work of layers, head and embedding at the same prices, so that a step in
which nothing is exchanged takes as long here as there. A layer's seconds are dealt to its weights by their parameters,
its norms left out. Earlier micro-batches run between the first one's forward and the last one's backward, which is the
one that sends.
"""

from autopar.cost_models.efficiency import Efficiency
from autopar.cost_models.gradient_exchange.model import ExchangeModel, Gradient
from autopar.cost_models.layer_work import PassWork, embedding_work, head_work, layer_work
from autopar.cost_models.step_time import step_parts
from autopar.cost_models.step_work import step_work, tensor_work
from autopar.cost_models.training_config import TrainingConfig, grad_nbytes
from autopar.cost_models.transformer import TransformerShape, attention_params, embedding_params, expert_params
from autopar.errors import ArgumentError
from autopar.values.cluster import Cluster


def transformer_gradients(
    shape: TransformerShape, config: TrainingConfig, cluster: Cluster, efficiency: Efficiency
) -> ExchangeModel:
    """The step of `config` on one replica, with the gradients that it exchanges.

    Raises:
        ArgumentError: if the configuration exchanges more than gradients, or gradients of several stages.
        MeshError: if the degrees do not fit the cluster or the model.
    """
    for name, value, needed in (("pp", config.pp, 1), ("ep", config.ep, 1), ("zero", config.zero, 0)):
        if value != needed:
            raise ArgumentError(
                f"exchange systems are compared for data and tensor parallel steps: {name} is {value}, make it {needed}"
            )
    total = step_work(shape, config, cluster, efficiency)  # checks the degrees
    device, price = cluster.device, efficiency.seconds_per_unit()

    def seconds(work: PassWork) -> tuple[float, float]:
        forward = float(work.forward @ price)
        return forward, float((work.backward + work.weight + work.recompute) @ price)

    tensor = tensor_work(shape, config, cluster, efficiency)
    layer = seconds(layer_work(shape, config, device, efficiency.num_sms) + tensor)
    head = seconds(head_work(shape, config, device, efficiency.num_sms))
    embedding = seconds(embedding_work(shape, config, device))
    size = grad_nbytes(config) / config.tp
    weights = _layer_weights(shape)
    parameters = sum(weights.values())
    gradients = []
    first = 0.0 if shape.tied else shape.vocab * shape.hidden * size
    if first:
        gradients.append(Gradient("head", first, head[1], head[0]))
    for number in reversed(range(shape.layers)):
        for name, count in reversed(weights.items()):
            part = count / parameters
            gradients.append(Gradient(f"{number}.{name}", count * size, part * layer[1], part * layer[0]))
    gradients.append(Gradient("embedding", embedding_params(shape) * size, embedding[1], embedding[0]))
    forward, backward = (float(work[0] @ price) for work in (total.forward, total.backward))
    # what no weight above has taken: a tied head's time, sums of gradients; and all micro-batches but one
    known_forward = sum(gradient.forward_seconds for gradient in gradients)
    known_backward = sum(gradient.backward_seconds for gradient in gradients)
    between = forward - known_forward + backward - known_backward + (config.num_microbatches - 1) * (forward + backward)
    gradients[0] = gradients[0]._replace(backward_seconds=gradients[0].backward_seconds + max(between, 0.0))
    return ExchangeModel(name=shape.name, gradients=tuple(gradients), update_seconds=step_parts(total, efficiency)[3])


def _layer_weights(shape: TransformerShape) -> dict[str, int]:
    """Parameters of a layer's weights in the order of forward, biases and norms with the weight that they follow."""
    attention = attention_params(shape)
    output = shape.query_dim * shape.hidden
    keys = shape.hidden * shape.kv_dim
    down = shape.ffn * shape.hidden
    found = {"query": attention - output - 2 * keys, "key": keys, "value": keys, "output": output}
    for expert in range(shape.experts):
        label = "" if shape.experts == 1 else f"expert{expert}."
        found |= {f"{label}up": expert_params(shape) - down, f"{label}down": down}
    return found
