"""The mathematics of MoSAR, torch only; its reference defines what every kernel must compute."""
