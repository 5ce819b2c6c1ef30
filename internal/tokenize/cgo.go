package tokenize

// The native library's place. -L counts for the whole link, so daulet/tokenizers' own -ltokenizers is found here too.
// scripts/native.sh writes native_stamp.h into this folder, which makes go build and link again when the library changes.

/*
#cgo CFLAGS: -I${SRCDIR}/../../native/include
#cgo LDFLAGS: -L${SRCDIR}/../../native/lib -ltokenizers -ldl -lm
#include <stdlib.h>
#include "prefixgate.h"
#if __has_include("native_stamp.h")
#include "native_stamp.h"
#endif
*/
import "C"
