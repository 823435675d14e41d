"""verl-shipper's node daemon: takes records from trainers, keeps them, delivers each once to every tracker."""

__version__ = "0.1.0"
