"""What all experiments share: conditions, runner, measures, reports."""
