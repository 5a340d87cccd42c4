"""Models as DAGs of components. `record` needs torch when it is called, not before."""

from parsim.model.build import record
from parsim.model.component import LOSS, Component, Operator, Parameter, Value
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec

__all__ = ["LOSS", "Component", "Model", "ModelSpec", "Operator", "Parameter", "Value", "load_model", "record"]
