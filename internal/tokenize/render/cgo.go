package render

// The native library's place. scripts/native.sh writes native_stamp.h into this folder, which makes go build and link
// again when the library changes.

/*
#cgo CFLAGS: -I${SRCDIR}/../../../native/include
#cgo LDFLAGS: -L${SRCDIR}/../../../native/lib -ltokenizers -ldl -lm
#cgo noescape prefixgate_template_render
#cgo nocallback prefixgate_template_render
#cgo noescape prefixgate_template_take
#cgo nocallback prefixgate_template_take
#include <stdlib.h>
#include "prefixgate_render.h"
#if __has_include("native_stamp.h")
#include "native_stamp.h"
#endif
*/
import "C"
