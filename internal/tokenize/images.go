package tokenize

import (
	"strings"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
)

// imageTokens returns the ids of the tokens that stand for one image, film or piece of sound in a rendered prompt, found by
// the names that models give them. An engine replaces each by as many tokens as the content takes.
func imageTokens(e *encoder, src *source, v *vocabulary) map[uint32]bool {
	ids := map[uint32]bool{}
	add := func(text string) {
		if got, err := e.encode(nil, text, false); err == nil && len(got) == 1 {
			ids[got[0]] = true
		}
	}
	// Gemma's template prints the begin-of-image token alone, others the image token.
	named := false
	for _, key := range [...]string{"boi_token", "image_token", "audio_token", "video_token"} {
		if text, ok := src.config.special[key].(string); ok && !(key == "image_token" && named) {
			add(text)
			named = true
		}
	}
	for _, t := range v.AddedTokens {
		switch strings.Trim(t.Content, "<>|[]") {
		case "image_pad", "video_pad", "audio_pad", "image", "video", "audio", "IMG", "AUDIO", "pg_image", "start_of_image", "AUDIO_PAD", "IMG_CONTEXT", "media_pad":
			add(t.Content)
		}
	}
	return ids
}

// marks places the contents that are not text: the k-th content belongs to the k-th token that stands for one. Where their
// numbers differ, nobody knows which is which, so all contents together mark the first such token, or the prompt's start:
// prompts with different images then share less than they could, never more.
func (m *Model) marks(ids []uint32, images []openai.Image) []block.Mark {
	if len(images) == 0 {
		return nil
	}
	marks := make([]block.Mark, 0, len(images))
	found := 0
	for i, id := range ids {
		if !m.images[id] {
			continue
		}
		if found < len(images) {
			marks = append(marks, block.Mark{Token: i, Digest: images[found].Digest})
		}
		found++
	}
	if found == len(images) {
		return marks
	}
	all := block.Mark{}
	if len(marks) > 0 {
		all.Token = marks[0].Token
	}
	for _, image := range images {
		all.Digest = all.Digest*0x9e3779b97f4a7c15 + image.Digest
	}
	return []block.Mark{all}
}
