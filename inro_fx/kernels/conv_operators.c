/* Convolutions as implementations of torch.ops.inro_fx.conv and conv_static; see operators.c. */

#include "operators.h"

/* Does a kernel run a convolution? `levels` of x: 0 where they are fixed; `each`: products for each number that is read or written.
   Without that many, floats are as fast, and without VNNI integers of two levels are not faster. */
int inro_covers_conv(int dtype, int64_t bits, int64_t group, int64_t columns, int levels, double each, const char **why) {
    const int level = inro_level();
    *why = dtype != FLOAT32 ? "numbers that are not float32"
        : bits != 8 || (group && group < columns) ? "codes of less than 8 bits or with groups"
        : columns < 1 || columns > 65536 ? "not 1 to 65536 columns: 255 * 127 * 65536 < 2^31"
        : levels && level < AVX2 ? "without AVX2 torch was faster"
        : levels == 2 && level < VNNI ? "activations of 15 bits without VNNI: torch was faster"
        : levels && each < (level >= VNNI ? 32 : 256) ? "it reads and writes about as much as it computes: torch was faster"
        : NULL;
    return !*why;
}

/* The integers of a list, into the last of three places, and how many there are; the others are `otherwise`. */
static int three_of(word list, int64_t to[3], int64_t otherwise) {
    size_t count = 0;
    const handle given = (handle)(uintptr_t)list;
    if (torch.list_size(given, &count) || count < 1 || count > 3) return 0;
    for (int i = 0; i < 3; i++) to[i] = otherwise;
    for (size_t i = 0; i < count; i++) {
        word item = 0;
        if (torch.list_item(given, i, &item)) return 0;
        to[3 - count + i] = (int64_t)item;
    }
    return (int)count;
}

/* The lists on the stack from kernel on, and groups and transposed behind them; the number of dimensions, 0 where they do not fit. */
static int geometry(const word *stack, convolution *to, int64_t output_padding[3]) {
    const int dims = three_of(stack[0], to->kernel, 1);
    const int fit = dims && three_of(stack[1], to->stride, 1) == dims && three_of(stack[2], to->pad, 0) == dims
        && three_of(stack[3], output_padding, 0) == dims && three_of(stack[4], to->dilation, 1) == dims;
    to->groups = (int64_t)stack[5];
    to->transposed = stack[6] != 0;
    for (int d = 0; d < 3 && fit; d++)
        if (to->kernel[d] < 1 || to->stride[d] < 1 || to->dilation[d] < 1 || to->pad[d] < 0) return 0;
    return fit && to->groups > 0 ? dims : 0;
}

/* Do the channels of a tensor [n, c, *size] lie side by side, without gaps? */
static int channels_last(const tensor *t) {
    int64_t step = t->sizes[1];
    if (t->sizes[1] != 1 && t->strides[1] != 1) return 0;
    for (int64_t i = t->dim; i-- > 2; step *= t->sizes[i])
        if (t->sizes[i] != 1 && t->strides[i] != step) return 0;
    return t->sizes[0] == 1 || t->strides[0] == step;
}

static int64_t columns_of(const convolution *l) { return l->kernel[0] * l->kernel[1] * l->kernel[2] * (l->in / l->groups); }

/* x, codes, scale and bias: does a kernel read them? It takes x as it lies, or a copy that it puts on the stack. */
static int operands(word *stack, word bias, int dims, convolution *to, const int64_t output_padding[3], int codes_may_be) {
    tensor x = tensor_of(stack[0]);
    const tensor codes = tensor_of(stack[1]), scale = tensor_of(stack[2]), b = bias ? tensor_of(optional(bias)) : (tensor){0};
    if (!x.plain || !codes.plain || !scale.plain || (bias && !b.plain) || x.dim != dims + 2 || codes.dim != 2 || codes.dtype != int8_dtype
        || scale.dtype != dtypes[FLOAT32] || !contiguous(&codes) || !contiguous(&scale)) return 0;
    if (x.dtype != dtypes[FLOAT32] && (!codes_may_be || x.dtype != uint8_dtype)) return 0;
    to->n = x.sizes[0];
    to->in = x.sizes[1];
    to->out = codes.sizes[0];
    if (to->in % to->groups || to->out % to->groups || !to->n || columns_of(to) != codes.sizes[1]
        || (numel(&scale) != 1 && numel(&scale) != to->out)
        || (bias && (b.dim != 1 || b.sizes[0] != to->out || b.dtype != dtypes[FLOAT32] || !contiguous(&b)))) return 0;
    for (int d = 0; d < 3; d++) {
        to->size[d] = d < 3 - dims ? 1 : x.sizes[d - 3 + dims + 2];
        const int64_t reach = to->dilation[d] * (to->kernel[d] - 1);
        to->result[d] = to->transposed ? (to->size[d] - 1) * to->stride[d] - 2 * to->pad[d] + reach + output_padding[d] + 1
            : (to->size[d] + 2 * to->pad[d] - reach - 1) / to->stride[d] + 1;
        if (to->size[d] < 1 || to->result[d] < 1 || (!to->transposed && to->size[d] + 2 * to->pad[d] <= reach)) return 0;
    }
    if (x.dtype == uint8_dtype) {
        if (!channels_last(&x)) return 0;
        to->x_form = CODES;
    } else if (contiguous(&x)) to->x_form = PLANES;
    else if (dims == 2 && channels_last(&x)) to->x_form = CHANNELS_LAST;
    else {
        make_contiguous(stack);
        x = tensor_of(stack[0]);
        to->x_form = PLANES;
    }
    to->x = x.data;
    to->codes = (const int8_t *)codes.data;
    to->scale = (const float *)scale.data;
    to->scale_step = numel(&scale) != 1;
    to->bias = (const float *)b.data;
    to->threads = threads();
    to->level = inro_level();
    return 1;
}

/* Products for each number that is read or written. */
static double density(const convolution *l) {
    const double results = (double)l->result[0] * l->result[1] * l->result[2], inputs = (double)l->size[0] * l->size[1] * l->size[2];
    const double taps = (double)l->kernel[0] * l->kernel[1] * l->kernel[2];
    const double products = (l->transposed ? inputs : results) * l->out * (l->in / l->groups) * taps;
    return products / (inputs * l->in + results * l->out);
}

static handle images(const convolution *l, int dims, int32_t dtype, void **data) {
    int64_t sizes[5] = {l->n, l->out}, strides[5], step = 1;
    const int last = l->y_form != PLANES;
    handle y = NULL;
    for (int d = 0; d < dims; d++) sizes[2 + d] = l->result[3 - dims + d];
    if (last) { strides[1] = 1; step = l->out; }
    for (int i = dims + 1; i >= (last ? 2 : 1); step *= sizes[i--]) strides[i] = step;
    strides[0] = step;
    if (torch.empty(dims + 2, sizes, strides, dtype, cpu, 0, &y) || torch.data(y, data)) return NULL;
    prefer_huge_pages(*data, (size_t)(step * l->n) * (dtype == uint8_dtype ? 1 : 4));
    return y;
}

static void drop_lists(const word *lists) {
    for (int i = 0; i < 5; i++) torch.delete_list((handle)(uintptr_t)lists[i]);
}

void op_conv(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    convolution l = {0};
    int64_t output_padding[3];
    const int dims = geometry(stack + 4, &l, output_padding);
    const char *why;
    l.levels = stack[11] ? 1 : 2;
    if (!dims || !operands(stack, stack[3], dims, &l, output_padding, 0)) { call_reference("inro_fx::conv", stack); return; }
    void *data = NULL;
    handle y = NULL;
    int outcome = 1;
    if (inro_covers_conv(FLOAT32, (int64_t)stack[12], (int64_t)stack[13], columns_of(&l), l.levels, density(&l), &why)) {
        l.y_form = l.x_form;
        y = images(&l, dims, dtypes[FLOAT32], &data);
        if (!y) fail("no memory for the results of a convolution");
        l.y = data;
        outcome = inro_convolution(&l);
    }
    else stack[11] = 0;                                /* with x as floats */
    if (outcome) {
        if (y) torch.delete_tensor(y);
        if (outcome < 0) fail("no memory for a quantized convolution");
        call_reference("inro_fx::conv", stack);
        return;
    }
    for (int i = 0; i < 3; i++) drop(stack[i]);
    drop_optional(stack[3]);
    drop_lists(stack + 4);
    stack[0] = (word)(uintptr_t)y;
}

/* A format from its scale and zero point, which are stored as of int8; 0 where they are none. */
static int format_of(word scale, word zero, format *to) {
    const tensor s = tensor_of(scale), z = tensor_of(zero);
    if (!s.plain || !z.plain || s.dtype != dtypes[FLOAT32] || z.dtype != int32_dtype || numel(&s) != 1 || numel(&z) != 1) return 0;
    *to = (format){*(const float *)s.data, *(const int32_t *)z.data + 128};
    return to->scale >= 1.17549435e-38f && to->zero >= 1 && to->zero <= 255;
}

void op_conv_static(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    convolution l = {.levels = 1, .fixed = 1, .activation = (int)(int64_t)stack[18]};
    double low, high;
    int64_t output_padding[3];
    memcpy(&low, stack + 19, sizeof low);
    memcpy(&high, stack + 20, sizeof high);
    l.low = (float)low;
    l.high = (float)high;
    const int dims = geometry(stack + 11, &l, output_padding), adds = stack[6] != 0, codes = stack[9] != 0;
    const char *why;
    int covered = dims && (codes || (int32_t)stack[22] == dtypes[FLOAT32]) && operands(stack, stack[5], dims, &l, output_padding, 1)
        && inro_covers_conv(FLOAT32, 8, 0, columns_of(&l), 0, 0, &why) && format_of(stack[3], stack[4], &l.input)
        && (!codes || (stack[10] && format_of(optional(stack[9]), optional(stack[10]), &l.output)));
    if (covered && adds) {
        const tensor r = tensor_of(optional(stack[6]));
        l.r_form = r.dtype == uint8_dtype ? CODES : CHANNELS_LAST;
        covered = (r.dtype == dtypes[FLOAT32]
                   || (r.dtype == uint8_dtype && stack[7] && stack[8] && format_of(optional(stack[7]), optional(stack[8]), &l.added)))
            && r.plain && r.dim == dims + 2 && channels_last(&r) && r.sizes[0] == l.n && r.sizes[1] == l.out;
        for (int d = 0; d < dims && covered; d++) covered = r.sizes[2 + d] == l.result[3 - dims + d];
        l.residual = r.data;
    }
    void *data = NULL;
    handle y = NULL;
    int outcome = 1;
    if (covered) {
        l.y_form = codes ? CODES : l.x_form == CHANNELS_LAST || stack[21] ? CHANNELS_LAST : PLANES;
        if (!codes) l.output.scale = 1.0f;
        y = images(&l, dims, codes ? uint8_dtype : dtypes[FLOAT32], &data);
        if (!y) fail("no memory for the results of a convolution");
        l.y = data;
        outcome = inro_convolution(&l);
    }
    if (outcome) {
        if (y) torch.delete_tensor(y);
        if (outcome < 0) fail("no memory for a quantized convolution");
        call_reference("inro_fx::conv_static", stack);
        return;
    }
    for (int i = 0; i < 5; i++) drop(stack[i]);
    for (int i = 5; i < 11; i++) drop_optional(stack[i]);
    drop_lists(stack + 11);
    stack[0] = (word)(uintptr_t)y;
}

/* Two sizes of a list; 0 where it has another number of them. */
static int two_of(word list, int64_t to[2]) {
    int64_t three[3];
    if (three_of(list, three, 0) != 2) return 0;
    memcpy(to, three + 1, 2 * sizeof *to);
    return 1;
}

void op_max_pool2d(word *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    const tensor x = tensor_of(stack[0]);
    pool p = {.threads = threads()};
    int covered = x.plain && x.dim == 4 && x.dtype == uint8_dtype && channels_last(&x) && two_of(stack[1], p.kernel) && two_of(stack[2], p.stride)
        && two_of(stack[3], p.pad) && two_of(stack[4], p.dilation);
    for (int d = 0; d < 2 && covered; d++) {
        p.size[d] = x.sizes[2 + d];
        if (p.kernel[d] < 1 || p.stride[d] < 1 || p.dilation[d] < 1 || p.pad[d] < 0 || p.pad[d] * 2 > p.kernel[d]) { covered = 0; break; }
        const int64_t room = p.size[d] + 2 * p.pad[d] - p.dilation[d] * (p.kernel[d] - 1) - 1;
        p.result[d] = (room + (stack[5] ? p.stride[d] - 1 : 0)) / p.stride[d] + 1;
        if (stack[5] && (p.result[d] - 1) * p.stride[d] >= p.size[d] + p.pad[d]) p.result[d]--;
        covered = room >= 0 && p.size[d] > 0;
    }
    if (!covered || !numel(&x)) { call_reference("inro_fx::max_pool2d", stack); return; }
    p.n = x.sizes[0];
    p.channels = x.sizes[1];
    const convolution like = {.n = p.n, .out = p.channels, .result = {1, p.result[0], p.result[1]}, .y_form = CODES};
    void *data = NULL;
    handle y = images(&like, 2, uint8_dtype, &data);
    if (!y) fail("no memory for the results of a pooling");
    p.x = (const uint8_t *)x.data;
    p.y = data;
    inro_max_pool(&p);
    drop(stack[0]);
    for (int i = 1; i < 5; i++) torch.delete_list((handle)(uintptr_t)stack[i]);
    stack[0] = (word)(uintptr_t)y;
}
