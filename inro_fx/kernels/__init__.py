"""C kernels for CPUs, built when the package is installed, and the table that says where they run.

Where there is no compiler, or no kernel for a case, the operators' reference implementations in plain torch run; `kernels`
says which, and why.
"""

from .binding import LEVELS, best_level, convolve, linear_int8, recurrent_steps, register, unavailable
from .choice import KERNELS, Case, choose, kernel_for, kernels

__all__ = ["KERNELS", "LEVELS", "Case", "best_level", "choose", "convolve", "kernel_for", "kernels", "linear_int8", "recurrent_steps",
           "register", "unavailable"]
