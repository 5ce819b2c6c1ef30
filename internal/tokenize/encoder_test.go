package tokenize

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"prefixgate/internal/testenv"
)

func bert(t *testing.T) *encoder {
	t.Helper()
	data, err := os.ReadFile(testenv.GoModuleTokenizer(t, "bert-base-uncased.json"))
	if err != nil {
		t.Fatal(err)
	}
	e, err := newHuggingFace(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.close)
	return e
}

// Everything that native code may throw at Go must come back as an error, or the process would be gone.
func TestPanicsStopAtTheBorder(t *testing.T) {
	e := newPanicking()
	defer e.close()
	for range 3 {
		if _, err := e.encode(nil, "text", false); !errors.Is(err, errPanicked) {
			t.Fatalf("encode with a panicking encoder = %v, want %v", err, errPanicked)
		}
	}
}

// The Go module's own Encode stops at a null byte.
func TestNullBytesDoNotEndTheText(t *testing.T) {
	e := bert(t)
	whole, err := e.encode(nil, "one\x00 two", false)
	if err != nil {
		t.Fatal(err)
	}
	short, err := e.encode(nil, "one", false)
	if err != nil {
		t.Fatal(err)
	}
	if len(whole) <= len(short) {
		t.Errorf("encode of a text with a null byte gives %d ids, its first part alone %d", len(whole), len(short))
	}
}

func TestBrokenTextIsAnError(t *testing.T) {
	e := bert(t)
	if _, err := e.encode(nil, "\xff\xfe", false); !errors.Is(err, errBadText) {
		t.Errorf("encode of bytes that are not UTF-8 = %v, want %v", err, errBadText)
	}
	var counts [1]uintptr
	if _, err := e.encodeSpans(nil, "é", []span{{0, 1}}, false, counts[:]); !errors.Is(err, errBadText) {
		t.Errorf("encode of half a character = %v, want %v", err, errBadText)
	}
	if _, err := e.encodeSpans(nil, "abc", []span{{2, 9}}, false, counts[:]); !errors.Is(err, errBadText) {
		t.Errorf("encode beyond the text = %v, want %v", err, errBadText)
	}
}

func TestSpansAndSpill(t *testing.T) {
	e := bert(t)
	// Every character is a token here, four times what encodeSpans makes room for.
	text := strings.Repeat("a.", 5000)
	ids, err := e.encode([]uint32{7}, text, false)
	if err != nil {
		t.Fatal(err)
	}
	if len(ids) != 1+len(text) || ids[0] != 7 {
		t.Fatalf("encode appends %d ids after %d, want %d after 7", len(ids)-1, ids[0], len(text))
	}
	var counts [2]uintptr
	got, err := e.encodeSpans(nil, "hello world", []span{{0, 5}, {5, 11}}, false, counts[:])
	if err != nil {
		t.Fatal(err)
	}
	want, err := e.encode(nil, "hello world", false)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) || counts != [2]uintptr{1, 1} {
		t.Errorf("spans give %v %v, the whole %v", got, counts, want)
	}
}

func TestCorruptTokenizerIsAnError(t *testing.T) {
	for _, text := range []string{"", "{", "{}", `{"model": {"type": "Nothing"}}`, "\x00\xff", `[1,2]`} {
		if e, err := newHuggingFace([]byte(text), nil); err == nil {
			e.close()
			t.Errorf("newHuggingFace(%q) = no error", text)
		}
		if e, err := newFastokens([]byte(text), nil); err == nil {
			e.close()
			t.Errorf("newFastokens(%q) = no error", text)
		}
	}
}
