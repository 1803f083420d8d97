/* The hash of each granule of some memory, in one call that lets go of Python's lock once.

   One call of `xxh3` for each granule lets go of the lock, and asks for it again, tens of thousands of times a step,
   while the thread that computes wants it too. The hash itself is the function of the `xxhash` package. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef uint64_t (*Digest)(const void *, size_t);

static PyObject *hash_granules(PyObject *module, PyObject *args)
{
    unsigned long long digest_address, source, num_bytes, granule_bytes, out;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKK", &digest_address, &source, &num_bytes, &granule_bytes, &out))
        return NULL;
    if (granule_bytes == 0) {
        PyErr_SetString(PyExc_ValueError, "granule_bytes is 0: give the size of a granule");
        return NULL;
    }
    Digest digest = (Digest)(uintptr_t)digest_address;
    const char *content = (const char *)(uintptr_t)source;
    uint64_t *hashes = (uint64_t *)(uintptr_t)out;
    Py_BEGIN_ALLOW_THREADS
    for (unsigned long long start = 0; start < num_bytes; start += granule_bytes) {
        unsigned long long rest = num_bytes - start;
        *hashes++ = digest(content + start, (size_t)(rest < granule_bytes ? rest : granule_bytes));
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"hash_granules", hash_granules, METH_VARARGS,
     "hash_granules(digest, source, num_bytes, granule_bytes, out): addresses and sizes; see the stub."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_granule_hashes", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__granule_hashes(void)
{
    return PyModuleDef_Init(&module);
}
