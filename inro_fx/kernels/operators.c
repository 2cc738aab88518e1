/* The kernels as implementations of torch.ops.inro_fx.*, registered with torch's dispatcher: no Python stands between a call and
   its kernel.

   torch's C interface for extensions (the functions named in `torch_functions`, stable since torch 2.10) hands over the arguments
   in a row of 64-bit words: tensors as handles that the callee owns, integers as they are, an optional tensor as the address of a
   word or 0. Their addresses come from Python (kernels/binding.py), so that nothing here is linked to torch.

   What these kernels do not cover goes to the overload `reference` of the same operator, which is Python. Errors are raised by
   torch's own `aoti_torch_check`, a C++ exception that passes through these frames. */

#include "operators.h"

/* ---- which cases the kernels cover ---- */

enum { LINEAR, LINEAR_DYNAMIC, LINEAR_STATIC, EMBEDDING, DEQUANTIZE };
enum { FEW = 2 };

/* Does a kernel run the case, and if not, why? The limits were measured. */
int inro_covers(int op, int dtype, int64_t bits, int64_t group, int64_t columns, int64_t rows, const char **why) {
    const int level = inro_level(), linear = op != EMBEDDING && op != DEQUANTIZE, grouped = bits < 8 || (group && group < columns);
    *why = dtype < 0 ? "numbers that are not float32, bfloat16 or float16"
        : bits < 2 || bits > 8 ? "codes that are not of 2 to 8 bits"
        : group < 0 ? "groups of less than no columns"
        : columns < 1 || columns > 65536 ? "not 1 to 65536 columns: 255 * 127 * 65536 < 2^31"
        : linear && grouped && rows > FEW && !inro_has_panels(level, bits, group < columns ? group : 0)
            ? "more than 2 rows, and no integer kernel for such groups: torch was faster"
        : op == LINEAR && !grouped && columns < 16 && rows > 8
            ? "more than 8 rows of less than 16 columns: torch was faster"
        : linear && !grouped && level < AVX2 && rows > (op == LINEAR ? 2 : 4)
            ? "more than 2 rows of floats, or 4 of integers, without AVX2: torch was faster"
        : NULL;
    return !*why;
}

/* ---- linear layers ---- */

typedef struct { word bias; int64_t bits, group, columns; word fixed[3]; } linear_arguments;

/* Are codes and scale of the sizes and dtypes that the kernels read? */
static int fits(const tensor *codes, const tensor *scale, int64_t bits, int64_t group, int64_t columns) {
    const int64_t bytes = bytes_of_row(columns, (int)bits), groups = group <= 0 || group >= columns ? 1 : (columns - 1) / group + 1;
    return codes->dim == 2 && scale->dim == 2 && codes->dtype == (bits == 8 ? int8_dtype : uint8_dtype) && codes->sizes[1] == bytes
        && (scale->dtype == dtypes[FLOAT32] || scale->dtype == dtypes[FLOAT16]) && (scale->sizes[0] == 1 || scale->sizes[0] == codes->sizes[0])
        && (scale->sizes[1] == groups || scale->sizes[1] == 1);
}

static int readable(const tensor *codes, const tensor *scale, int64_t bits, int64_t group, int64_t columns) {
    return codes->plain && scale->plain && fits(codes, scale, bits, group, columns) && contiguous(codes) && contiguous(scale);
}

/* What is wrong with the arguments of a linear, or NULL. */
static const char *wrong_linear(const tensor *x, const tensor *codes, const tensor *scale, const tensor *bias, const linear_arguments *a,
                                char *text, size_t room) {
    if (x->dim == 0) return "a linear got a number, and needs at least one dimension";
    if (x->sizes[x->dim - 1] != a->columns) {
        snprintf(text, room, "a linear of %lld inputs got %lld", (long long)a->columns, (long long)x->sizes[x->dim - 1]);
        return text;
    }
    if (float_dtype(x->dtype) < 0 && x->dtype != float64_dtype) return "a quantized linear needs floating-point inputs";
    if (bias && bias->dtype != x->dtype) return "the bias of a linear is of another dtype than its input";
    if ((a->bits <= 8 && !fits(codes, scale, a->bits, a->group, a->columns))
        || (bias && (bias->dim != 1 || bias->sizes[0] != codes->sizes[0])))
        return "codes, scale and bias of a quantized linear do not fit each other";
    return NULL;
}

/* The tensor on the stack, and on the stack a copy of it whose rows lie side by side if they do not. */
static tensor in_rows(word *given) {
    const tensor x = tensor_of(*given);
    if (!x.plain || x.dim == 0 || row_step(&x) >= 0) return x;
    make_contiguous(given);
    return tensor_of(*given);
}

static void linear(int op, const char *name, word *stack, const linear_arguments *a) {
    const tensor x = in_rows(stack), codes = tensor_of(stack[1]), scale = tensor_of(stack[2]);
    const tensor bias = a->bias ? tensor_of(optional(a->bias)) : (tensor){0};
    char text[128];
    const char *why, *wrong = x.plain && codes.plain && scale.plain && (!a->bias || bias.plain)
        ? wrong_linear(&x, &codes, &scale, a->bias ? &bias : NULL, a, text, sizeof text) : NULL;
    const int dtype = float_dtype(x.dtype);
    const int64_t step = x.plain && !wrong ? row_step(&x) : -1, rows = step >= 0 && a->columns ? numel(&x) / a->columns : 0;
    int covered = !wrong && step >= 0 && readable(&codes, &scale, a->bits, a->group, a->columns)
        && (!a->bias || (bias.plain && contiguous(&bias))) && inro_covers(op, dtype, a->bits, a->group, a->columns, rows, &why);
    const float *input_scale = NULL;
    const int32_t *zero = NULL, *sums = NULL;
    if (op == LINEAR_STATIC && covered) {
        const tensor s = tensor_of(a->fixed[0]), z = tensor_of(a->fixed[1]), t = tensor_of(a->fixed[2]);
        covered = s.plain && z.plain && t.plain && contiguous(&t);
        if (covered && (s.dtype != dtypes[FLOAT32] || z.dtype != int32_dtype || t.dtype != int32_dtype || numel(&s) != 1 || numel(&z) != 1
                        || numel(&t) != codes.sizes[0]))
            wrong = "scale, zero point and sums of a quantized linear do not fit each other";
        input_scale = (const float *)s.data;
        zero = (const int32_t *)z.data;
        sums = (const int32_t *)t.data;
    }
    if (!wrong && !covered) { call_reference(name, stack); return; }
    void *to = NULL;
    handle y = wrong ? NULL : result(&x, 0, codes.sizes[0], dtype, &to);
    int failed = !y;
    if (y) {
        const int64_t out = codes.sizes[0], scale_step = scale.sizes[0] == 1 && out != 1 ? 0 : scale.sizes[1];
        const int64_t group = scale.sizes[1] == 1 ? 0 : a->group;          /* below `columns` */
        const layer l = {x.data, codes.data, scale.data, bias.data, to, rows, a->columns, step, out, group, scale_step, (int)a->bits, dtype,
                         float_dtype(scale.dtype), op == LINEAR ? 2 : 1, threads(), -1, input_scale, zero, sums};
        const int integers = (l.bits == 8 && !group) || (rows > FEW && inro_has_panels(inro_level(), l.bits, group));
        failed = integers ? inro_linear(&l) : inro_linear_groups(&l);
    }
    drop(stack[0]);
    drop(stack[1]);
    drop(stack[2]);
    drop_optional(a->bias);
    if (op == LINEAR_STATIC)
        for (int i = 0; i < 3; i++) drop(a->fixed[i]);
    if (failed && y) torch.delete_tensor(y);
    if (failed) fail(wrong ? wrong : "no memory for a quantized linear");
    stack[0] = (word)(uintptr_t)y;
}

static void op_linear(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const linear_arguments a = {stack[3], (int64_t)stack[4], (int64_t)stack[5], (int64_t)stack[6], {0}};
    linear(LINEAR, "inro_fx::linear", stack, &a);
}

static void op_linear_dynamic(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const linear_arguments a = {stack[3], 8, 0, (int64_t)stack[4], {0}};
    linear(LINEAR_DYNAMIC, "inro_fx::linear_dynamic", stack, &a);
}

static void op_linear_static(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const linear_arguments a = {stack[6], 8, 0, (int64_t)stack[7], {stack[4], stack[5], stack[3]}};
    linear(LINEAR_STATIC, "inro_fx::linear_static", stack, &a);
}

/* ---- rows of a matrix as floats ---- */

static void op_dequantize(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const tensor codes = tensor_of(stack[0]), scale = tensor_of(stack[1]);
    const int64_t bits = (int64_t)stack[2], group = (int64_t)stack[3], columns = (int64_t)stack[4];
    const int dtype = float_dtype((int32_t)stack[5]);
    const char *why;
    if (!inro_covers(DEQUANTIZE, dtype, bits, group, columns, 1, &why) || !readable(&codes, &scale, bits, group, columns)) {
        call_reference("inro_fx::dequantize", stack);
        return;
    }
    const int64_t rows = codes.sizes[0];
    void *to = NULL;
    handle y = result(NULL, rows, columns, dtype, &to);
    const int failed = !y || inro_expand(codes.data, rows, columns, (int)bits, scale.sizes[1] == 1 ? 0 : group, scale.data, float_dtype(scale.dtype),
                                         scale.sizes[0] == 1 && rows != 1 ? 0 : scale.sizes[1], NULL, to, dtype, threads(), -1);
    drop(stack[0]);
    drop(stack[1]);
    if (failed && y) torch.delete_tensor(y);
    if (failed) fail("no memory for the weights of a layer");
    stack[0] = (word)(uintptr_t)y;
}

static void op_embedding(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const tensor ids = tensor_of(stack[0]), codes = tensor_of(stack[1]), scale = tensor_of(stack[2]);
    const int64_t bits = (int64_t)stack[3], group = (int64_t)stack[4], columns = (int64_t)stack[5];
    const int dtype = float_dtype((int32_t)stack[6]);
    const char *why;
    if (!ids.plain || ids.dim >= DIMS || ids.dtype != int64_dtype || !contiguous(&ids)
        || !inro_covers(EMBEDDING, dtype, bits, group, columns, 1, &why) || !readable(&codes, &scale, bits, group, columns)) {
        call_reference("inro_fx::embedding", stack);
        return;
    }
    const int64_t count = numel(&ids), *which = (const int64_t *)ids.data;
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= which[i] < 0 || which[i] >= codes.sizes[0];
    int64_t sizes[DIMS + 1];
    memcpy(sizes, ids.sizes, (size_t)ids.dim * sizeof(int64_t));
    const tensor shape = {NULL, ids.dim + 1, sizes, NULL, 0, 1};
    void *to = NULL;
    handle y = outside ? NULL : result(&shape, 0, columns, dtype, &to);
    const int failed = !y || inro_expand(codes.data, count, columns, (int)bits, scale.sizes[1] == 1 ? 0 : group, scale.data, float_dtype(scale.dtype),
                                         scale.sizes[0] == 1 && codes.sizes[0] != 1 ? 0 : scale.sizes[1], which, to, dtype, threads(), -1);
    drop(stack[0]);
    drop(stack[1]);
    drop(stack[2]);
    if (failed && y) torch.delete_tensor(y);
    if (failed) fail(outside ? "index out of range in self" : "no memory for the rows of a table");
    stack[0] = (word)(uintptr_t)y;
}

static const struct { const char *name; boxed function; } operators[] = {
    {"linear", op_linear}, {"linear_dynamic", op_linear_dynamic}, {"linear_static", op_linear_static},
    {"embedding", op_embedding}, {"dequantize", op_dequantize}, {"conv", op_conv}, {"conv_static", op_conv_static},
    {"max_pool2d", op_max_pool2d},
};

/* Implements the operators on CPUs, by the addresses of torch's functions; 0, or -1 where torch refuses. */
int inro_register(void *const *addresses) {
    memcpy(&torch, addresses, sizeof torch);
    dtypes[FLOAT32] = torch.float32();
    dtypes[BFLOAT16] = torch.bfloat16();
    dtypes[FLOAT16] = torch.float16();
    int8_dtype = torch.int8();
    uint8_dtype = torch.uint8();
    int32_dtype = torch.int32();
    int64_dtype = torch.int64();
    float64_dtype = torch.float64();
    cpu = torch.cpu();
    strided = torch.strided();
    handle library = NULL;
    if (torch.library("inro_fx", "CPU", __FILE__, __LINE__, &library)) return -1;
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        char inference[64];
        snprintf(inference, sizeof inference, "%s.inference", operators[i].name);
        if (torch.implement(library, operators[i].name, operators[i].function, abi)
            || torch.implement(library, inference, operators[i].function, abi)) return -1;
    }
    return 0;
}
