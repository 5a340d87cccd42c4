"""The controller that changes plans while a run goes on."""
