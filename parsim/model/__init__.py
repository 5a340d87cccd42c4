"""Models as DAGs of components. `trace` needs torch when it is called, not before."""

from parsim.model.component import LOSS, Component, Operator, Parameter, Value
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.model.trace.trace import record, trace

__all__ = ["LOSS", "Component", "Model", "ModelSpec", "Operator", "Parameter", "Value", "load_model", "record", "trace"]
