/* Tensors as torch's C interface gives them, and calls back into torch. */

#include "operators.h"

struct torch_functions torch;
int32_t dtypes[3], float64_dtype, int8_dtype, uint8_dtype, int32_dtype, int64_dtype, cpu, strided;

tensor tensor_of(word given) {
    const handle from = (handle)(uintptr_t)given;
    tensor t = {0};
    int32_t device = -1, layout = -1;
    void *data = NULL;
    t.plain = !torch.device(from, &device) && device == cpu && !torch.layout(from, &layout) && layout == strided && !torch.dim(from, &t.dim)
        && t.dim <= DIMS && !torch.sizes(from, &t.sizes) && !torch.strides(from, &t.strides) && !torch.dtype(from, &t.dtype)
        && !torch.data(from, &data);
    t.data = data;
    return t;
}

int64_t numel(const tensor *t) {
    int64_t n = 1;
    for (int64_t i = 0; i < t->dim; i++) n *= t->sizes[i];
    return n;
}

int contiguous(const tensor *t) {
    int64_t step = 1;
    for (int64_t i = t->dim; i-- > 0; step *= t->sizes[i])
        if (t->sizes[i] != 1 && t->strides[i] != step) return 0;
    return 1;
}

/* x as rows of numbers side by side: the step from row to row, or -1. */
int64_t row_step(const tensor *x) {
    const int64_t last = x->dim - 1;
    int64_t step = -1, rows = 1;
    if (x->sizes[last] != 1 && x->strides[last] != 1) return -1;
    for (int64_t i = last; i-- > 0; rows *= x->sizes[i]) {
        if (x->sizes[i] == 1) continue;
        if (step < 0) step = x->strides[i];
        else if (x->strides[i] != step * rows) return -1;
    }
    return step < 0 ? x->sizes[last] : step;
}

int float_dtype(int32_t dtype) {
    for (int i = 0; i < 3; i++)
        if (dtypes[i] == dtype) return i;
    return -1;
}

void drop(word given) { torch.delete_tensor((handle)(uintptr_t)given); }

/* The optional tensor of `given`, or 0. */
word optional(word given) { return given ? *(word *)(uintptr_t)given : 0; }

void drop_optional(word given) {
    if (!given) return;
    drop(optional(given));
    torch.delete_word((word *)(uintptr_t)given);
}

void fail(const char *message) { torch.check(0, "inro_fx", __FILE__, 0, message); }

/* The operator as Python has it: whatever the kernels do not cover. */
void call_reference(const char *name, word *stack) {
    if (!torch.call(name, "reference", stack, abi)) return;
    const char *why = torch.last_error ? torch.last_error() : NULL;
    fail(why ? why : "the reference of this operator failed: call its overload `reference` to see why");
}

/* A result like x but for its last size (x NULL: [rows, columns]), and where its numbers go. */
handle result(const tensor *x, int64_t rows, int64_t columns, int dtype, void **data) {
    int64_t sizes[DIMS + 1], strides[DIMS + 1], step = 1;
    const int64_t dim = x ? x->dim : 2;
    handle y = NULL;
    if (x) memcpy(sizes, x->sizes, (size_t)dim * sizeof(int64_t));
    else sizes[0] = rows;
    sizes[dim - 1] = columns;
    for (int64_t i = dim; i-- > 0; step *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = step;
    if (torch.empty(dim, sizes, strides, dtypes[dtype], cpu, 0, &y) || torch.data(y, data)) return NULL;
    prefer_huge_pages(*data, (size_t)step * size_of(dtype));
    return y;
}

int threads(void) {
    uint32_t n = 1;
    return torch.threads(&n) ? 1 : (int)n;
}

/* The tensor on the stack, as a copy without gaps if it has some. */
void make_contiguous(word *given) {
    word stack[2] = {*given, (word)(uint32_t)torch.contiguous_format()};
    if (torch.call("aten::contiguous", "", stack, abi)) fail("no memory for the input of a layer");
    *given = stack[0];
}
