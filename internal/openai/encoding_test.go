package openai

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// encodings compress as clients do: with the standard library where it can.
var encodings = map[string]func(io.Writer) io.WriteCloser{
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"raw": func(w io.Writer) io.WriteCloser {
		f, _ := flate.NewWriter(w, 6)
		return f
	},
	"zstd": func(w io.Writer) io.WriteCloser {
		z, _ := zstd.NewWriter(w)
		return z
	},
}

func encode(name string, body []byte) []byte {
	var b bytes.Buffer
	w := encodings[name](&b)
	w.Write(body)
	w.Close()
	return b.Bytes()
}

// Elsewhere compressed requests were parsed as they came and refused as invalid JSON.
func TestDecodeBody(t *testing.T) {
	plain := benchBody(20_000)
	for _, c := range []struct {
		name   string
		header http.Header
		body   []byte
	}{
		{"none", nil, plain},
		{"identity", http.Header{"Content-Encoding": {"identity"}}, plain},
		{"gzip", http.Header{"Content-Encoding": {"gzip"}}, encode("gzip", plain)},
		{"x-gzip", http.Header{"Content-Encoding": {" X-GZIP "}}, encode("gzip", plain)},
		{"deflate", http.Header{"Content-Encoding": {"deflate"}}, encode("deflate", plain)},
		{"raw deflate", http.Header{"Content-Encoding": {"deflate"}}, encode("raw", plain)},
		{"zstd", http.Header{"Content-Encoding": {"zstd"}}, encode("zstd", plain)},
		{"gzip twice", http.Header{"Content-Encoding": {"gzip, gzip"}}, encode("gzip", encode("gzip", plain))},
		{"two lines", http.Header{"Content-Encoding": {"gzip", "zstd"}}, encode("zstd", encode("gzip", plain))},
		{"two members", http.Header{"Content-Encoding": {"gzip"}}, append(encode("gzip", plain[:500]), encode("gzip", plain[500:])...)},
	} {
		got, err := DecodeBody(c.header, c.body, 1<<20)
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%s: DecodeBody = %d bytes, %v; want the plain body", c.name, len(got), err)
		}
	}
}

func TestDecodeBodyRefuses(t *testing.T) {
	plain := benchBody(20_000)
	packed := encode("gzip", plain)
	for _, c := range []struct {
		name, coding string
		body         []byte
		limit        int64
		want         int
	}{
		{"unknown", "br", packed, 1 << 20, 415},
		{"unknown below", "br, gzip", packed, 1 << 20, 415},
		{"too many", "gzip, gzip, gzip, gzip", packed, 1 << 20, 415},
		{"not gzip", "gzip", plain, 1 << 20, 400},
		{"empty gzip", "gzip", nil, 1 << 20, 400},
		{"cut gzip", "gzip", packed[:len(packed)/2], 1 << 20, 400},
		{"cut zstd", "zstd", encode("zstd", plain)[:100], 1 << 20, 400},
		{"not deflate", "deflate", plain, 1 << 20, 400},
		{"not zstd", "zstd", plain, 1 << 20, 400},
		{"over the limit", "gzip", packed, int64(len(plain)) - 1, 413},
		{"zstd over the limit", "zstd", encode("zstd", plain), int64(len(plain)) - 1, 413},
	} {
		_, err := DecodeBody(http.Header{"Content-Encoding": {c.coding}}, c.body, c.limit)
		var e *Error
		if !errors.As(err, &e) || e.Status != c.want {
			t.Errorf("%s: DecodeBody = %v, want status %d", c.name, err, c.want)
		}
	}
	if got, err := DecodeBody(http.Header{"Content-Encoding": {"gzip"}}, packed, int64(len(plain))); err != nil || len(got) != len(plain) {
		t.Errorf("at the limit: DecodeBody = %d bytes, %v; want all", len(got), err)
	}
}

// A small body must not become a large one in memory.
func TestDecodeBodyBoundsBombs(t *testing.T) {
	zeros := make([]byte, 4<<20)
	for name := range encodings {
		bomb := encode(name, zeros)
		coding := name
		if name == "raw" {
			coding = "deflate"
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := DecodeBody(http.Header{"Content-Encoding": {coding}}, bomb, 64<<10)
		runtime.ReadMemStats(&after)
		var e *Error
		if !errors.As(err, &e) || e.Status != 413 {
			t.Errorf("%s: DecodeBody = %v, want 413", name, err)
		}
		limit := uint64(1 << 20)
		if name == "zstd" {
			limit = 12 << 20 // The window that the sender may ask for.
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > limit {
			t.Errorf("%s: a bomb of %d bytes allocated %d, want at most %d", name, len(bomb), n, limit)
		}
	}
}

func TestDecodeBodySurvivesNoise(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	plain := benchBody(2_000)
	for name := range encodings {
		good := encode(name, plain)
		for range 300 {
			b := bytes.Clone(good)
			for range 1 + rng.IntN(4) {
				b[rng.IntN(len(b))] = byte(rng.IntN(256))
			}
			coding := name
			if name == "raw" {
				coding = "deflate"
			}
			if got, err := DecodeBody(http.Header{"Content-Encoding": {coding}}, b, 1<<20); err == nil && len(got) > 1<<20 {
				t.Fatalf("%s: %d bytes", name, len(got))
			}
		}
	}
}
