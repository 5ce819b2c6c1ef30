package gateway

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
)

// requestIDHeader carries the id by which a request is known to the client, the gateway's log and the engine.
const requestIDHeader = "X-Request-Id"

// maxRequestID bounds what is taken from a client, in bytes.
const maxRequestID = 128

// requestID returns the client's own id if it is one, else a new one.
func requestID(h http.Header) string {
	values := h[requestIDHeader]
	if len(values) == 1 && validRequestID(values[0]) {
		return values[0]
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // it cannot fail
	return hex.EncodeToString(b[:])
}

func validRequestID(id string) bool {
	if id == "" || len(id) > maxRequestID {
		return false
	}
	for i := range len(id) {
		switch c := id[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case c == '-', c == '_', c == '.', c == ':', c == '/', c == '+', c == '=', c == '@':
		default:
			return false
		}
	}
	return true
}
