package tokenize

/*
#include <stdlib.h>
#include "prefixgate.h"

// Declared by daulet/tokenizers, whose header lies in that module.
extern void tokenizers_free_string(char *string);
*/
import "C"

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"unsafe"

	"github.com/daulet/tokenizers"
)

// encoder turns text into token ids with native code. Its methods are safe for concurrent use, except close, which must be
// the last. A call runs on the caller's thread and cannot be interrupted.
type encoder struct {
	handle *C.prefixgate_encoder
	// owner keeps the tokenizer alive that a HuggingFace handle borrows; nil for fastokens.
	owner *tokenizers.Tokenizer
}

// span is a stretch of a text in bytes; its layout is that of prefixgate_span.
type span struct {
	start, end uintptr
}

// Errors of encode. They never quote the text.
var (
	errBadText  = errors.New("the text is not UTF-8 or is cut inside a character")
	errFailed   = errors.New("the encoder refused the text")
	errPanicked = errors.New("the encoder panicked")
)

// newHuggingFace builds the reference encoder from the text of a tokenizer.json. extra is a JSON list of the tokens that
// tokenizer_config.json adds to it, possibly empty.
func newHuggingFace(tokenizerJSON, extra []byte) (*encoder, error) {
	if len(tokenizerJSON) == 0 {
		return nil, errors.New("the file is empty")
	}
	owner, err := tokenizers.FromBytes(tokenizerJSON)
	if err != nil {
		return nil, err
	}
	// The Go module encodes C strings only, which end at the first null byte. Its handle, the one field of its Tokenizer,
	// serves to call the same tokenizer with a length.
	field := reflect.ValueOf(owner).Elem().Field(0)
	if field.Kind() != reflect.UnsafePointer {
		panic("BUG: daulet/tokenizers changed its Tokenizer: adapt newHuggingFace to this version")
	}
	var cErr *C.char
	ptr, n := bytesPointer(extra)
	handle := C.prefixgate_encoder_hf(field.UnsafePointer(), ptr, n, &cErr)
	if handle == nil {
		_ = owner.Close() // the error below says more
		return nil, takeError(cErr)
	}
	return &encoder{handle: handle, owner: owner}, nil
}

// newFastokens builds fastokens' encoder; parameters as for newHuggingFace.
func newFastokens(tokenizerJSON, extra []byte) (*encoder, error) {
	var cErr *C.char
	ptr, n := bytesPointer(tokenizerJSON)
	extraPtr, extraLen := bytesPointer(extra)
	handle := C.prefixgate_encoder_fast(ptr, n, extraPtr, extraLen, &cErr)
	if handle == nil {
		return nil, takeError(cErr)
	}
	return &encoder{handle: handle}, nil
}

// newPanicking builds an encoder whose every call panics in native code.
func newPanicking() *encoder {
	return &encoder{handle: C.prefixgate_encoder_panics()}
}

// close frees the native memory. No other method may run meanwhile or afterwards.
func (e *encoder) close() {
	C.prefixgate_encoder_free(e.handle)
	e.handle = nil
	if e.owner != nil {
		_ = e.owner.Close() // it fails only for a tokenizer that was never made
		e.owner = nil
	}
}

// encode appends the ids of text to dst. addSpecial asks for the tokens that the tokenizer puts around a text.
func (e *encoder) encode(dst []uint32, text string, addSpecial bool) ([]uint32, error) {
	whole := [1]span{{0, uintptr(len(text))}}
	var counts [1]uintptr
	return e.encodeSpans(dst, text, whole[:], addSpecial, counts[:])
}

// encodeSpans encodes each span of text by itself and appends all ids to dst, in order. counts[i] becomes the number of ids
// of spans[i].
func (e *encoder) encodeSpans(dst []uint32, text string, spans []span, addSpecial bool, counts []uintptr) ([]uint32, error) {
	if len(spans) == 0 {
		return dst, nil
	}
	if len(counts) < len(spans) {
		panic("BUG: fewer counts than spans")
	}
	// About four bytes make a token. A guess that is too small costs one more copy.
	if want := len(text)/4 + 16; cap(dst)-len(dst) < want {
		grown := make([]uint32, len(dst), len(dst)+want)
		copy(grown, dst)
		dst = grown
	}
	room := dst[len(dst):cap(dst)]
	var n C.size_t
	var spill unsafe.Pointer
	status := C.prefixgate_encode(e.handle,
		(*C.uint8_t)(unsafe.StringData(text)), C.size_t(len(text)),
		(*C.prefixgate_span)(unsafe.Pointer(unsafe.SliceData(spans))), C.size_t(len(spans)),
		C.bool(addSpecial),
		(*C.size_t)(unsafe.Pointer(unsafe.SliceData(counts))),
		(*C.uint32_t)(unsafe.SliceData(room)), C.size_t(len(room)), &n, &spill)
	runtime.KeepAlive(e)
	switch status {
	case C.PREFIXGATE_OK:
	case C.PREFIXGATE_BAD_TEXT:
		return dst, errBadText
	case C.PREFIXGATE_PANICKED:
		return dst, errPanicked
	default:
		return dst, errFailed
	}
	if spill == nil {
		return dst[:len(dst)+int(n)], nil
	}
	grown := make([]uint32, len(dst)+int(n))
	copy(grown, dst)
	C.prefixgate_take(spill, (*C.uint32_t)(unsafe.SliceData(grown[len(dst):])))
	return grown, nil
}

// trimNative gives native memory that is free back to the system.
func trimNative() { C.prefixgate_trim() }

// bytesPointer returns b as C wants it. The result is valid during the call it is handed to.
func bytesPointer(b []byte) (*C.uint8_t, C.size_t) {
	return (*C.uint8_t)(unsafe.SliceData(b)), C.size_t(len(b))
}

// takeError turns an error text of native code into an error and frees it.
func takeError(cErr *C.char) error {
	if cErr == nil {
		return errors.New("native code gave no reason")
	}
	defer C.tokenizers_free_string(cErr)
	return fmt.Errorf("%s", C.GoString(cErr))
}
