package openai

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// maxCodings is how many Content-Encodings may lie over each other. Two have been seen, from a proxy that did not look.
const maxCodings = 3

// DecodeBody takes the Content-Encodings that header names off body and returns what is below: at most limitBytes, and at no
// time much more in memory. Without an encoding it returns body itself. gzip, deflate (with or without the zlib header)
// and zstd are known. The error is an *Error for the client: 415 for an unknown encoding, 413 for a body that grows over the
// limit, 400 for one that is not what the header says.
func DecodeBody(header http.Header, body []byte, limitBytes int64) ([]byte, error) {
	var codings []string
	for _, line := range header["Content-Encoding"] {
		for coding := range strings.SplitSeq(line, ",") {
			if coding = strings.ToLower(strings.TrimSpace(coding)); coding != "" && coding != "identity" {
				codings = append(codings, coding)
			}
		}
	}
	if len(codings) > maxCodings {
		return nil, UnsupportedEncoding()
	}
	// The last coding named was put on last.
	for _, coding := range slices.Backward(codings) {
		var err error
		if body, err = decode(coding, body, limitBytes); err != nil {
			return nil, err
		}
	}
	return body, nil
}

// decode takes off one coding.
func decode(coding string, body []byte, limitBytes int64) ([]byte, error) {
	in := bytes.NewReader(body)
	var out io.Reader
	var err error
	switch coding {
	case "gzip", "x-gzip":
		out, err = gzip.NewReader(in)
	case "deflate":
		// By the standard there is a zlib header; some clients leave it out.
		if len(body) >= 2 && body[0]&0x0f == 8 && (int(body[0])<<8|int(body[1]))%31 == 0 {
			out, err = zlib.NewReader(in)
		} else {
			out = flate.NewReader(in)
		}
	case "zstd":
		var z *zstd.Decoder
		// The window is memory that the sender asks for; RFC 9659 lets HTTP senders ask for 8 MiB.
		if z, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20)); err == nil {
			defer z.Close()
			out = z
		}
	default:
		return nil, UnsupportedEncoding()
	}
	if err != nil {
		return nil, malformed(coding)
	}
	// Compressed text shrinks to a quarter or so; what a bomb claims is not allocated before it is there.
	buf := bytes.NewBuffer(make([]byte, 0, min(4*int64(len(body))+bytes.MinRead, limitBytes+bytes.MinRead, 1<<20)))
	n, err := io.Copy(buf, io.LimitReader(out, limitBytes+1))
	switch {
	case n > limitBytes || errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return nil, BodyTooLarge(limitBytes)
	case err != nil:
		return nil, malformed(coding)
	}
	return buf.Bytes(), nil
}

func malformed(coding string) *Error {
	return BadRequest("invalid_encoding", "", "the request body is not valid "+coding+", as its Content-Encoding says: send it again or without an encoding")
}
