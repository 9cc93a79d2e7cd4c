/* Module in place of Transformer Engine's extension for torch, for `make te-env EXTENSION=empty`.
   Every name of it exists and does nothing, which is enough to import and build layers. */
#include <Python.h>

static const char *names =
    "class Name:\n"
    "    def __init__(self, path):\n"
    "        self.path, self.parts = path, {}\n"
    "    def __getattr__(self, name):\n"
    "        if name.startswith('__'):\n"
    "            raise AttributeError(name)\n"
    "        return self.parts.setdefault(name, Name(f'{self.path}.{name}'))\n"
    "    def __call__(self, *_, **__):\n"
    "        raise NotImplementedError(f'{self.path}: this environment has an empty extension')\n"
    "    def __int__(self):\n"
    "        return 0\n"
    "every_name = Name('transformer_engine_torch')\n"
    "def get_cudnn_version():\n"
    "    return 92000\n"
    "def __getattr__(name):\n"
    "    return getattr(every_name, name)\n";

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "transformer_engine_torch", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_transformer_engine_torch(void) {
  PyObject *made = PyModule_Create(&module);
  if (made == NULL) return NULL;
  PyObject *dict = PyModule_GetDict(made);
  PyDict_SetItemString(dict, "__builtins__", PyEval_GetBuiltins());
  PyObject *done = PyRun_String(names, Py_file_input, dict, dict);
  if (done == NULL) return NULL;
  Py_DECREF(done);
  return made;
}
