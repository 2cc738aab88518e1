"""int2_g32 to int6_g32: few bits with all their codes, in groups of 32 with a float16 scale that has a sign; half a bit more a weight."""

from .uniform import Uniform

int2_g32, int3_g32, int4_g32, int5_g32, int6_g32 = (
    Uniform(f"int{bits}_g32", 2**(bits - 1) - 1, 32, full_range=True, scale_dtype="float16") for bits in range(2, 7))
